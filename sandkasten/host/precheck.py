"""Examines the machine: reads what can be read and lets `nsinit/tools/probe.py` try the rest. Changes nothing that stays.

Used at start, by `sandkasten doctor` and by `/v1/system`. Facts a person can act on (who runs this, where the data
directory is) come first, so that a failed system call is the last resort for an explanation, not the first.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from nsinit.wire import protocol as nsinit_protocol
from sandkasten.host import examine as host_checks
from sandkasten.host import hardening
from sandkasten.host.checks import CATALOGUE, fails, works
from sandkasten.host.surroundings import Host, advise, read_host
from sandkasten.model.node import Check, Machine, Verdict

_PROBE = Path(nsinit_protocol.__file__).parents[1] / "tools" / "probe.py"
_PROBE_S = 120
"""Longer than every trial's own deadline together; a healthy machine takes a third of a second."""

_REFUSED = (errno.EPERM, errno.EACCES)


@attrs.frozen
class Probed:
    """What the probe answered."""

    checks: list[Check]
    facts: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values


def examine(data_dir: Path, *, thorough: bool = False) -> Machine:
    """Return the examination of this machine for that data directory, which need not exist.

    A process tries once for each file system: what a kernel can do does not change while it runs. With `thorough`
    everything is tried afresh, and also what takes a moment or writes to the kernel's log.
    """
    host = read_host()
    directory = _place(data_dir)
    if thorough:
        tried = probe(directory, host, thorough=True)
    else:
        tried = _try_once(_Place(directory.stat().st_dev, directory, host))
    checks = [*host_checks.read_all(data_dir, host), *tried.checks]
    order = list(CATALOGUE)
    checks.sort(key=lambda check: order.index(check.id))
    facts = {"container": host.container, "wsl": host.is_wsl, **tried.facts}
    return Machine(datetime.now(UTC), [*checks, *hardening.check_settings()], facts)


def _place(data_dir: Path) -> Path:
    """Return where trials may write: on the data directory's file system, or where an ordinary user may."""
    nearest = host_checks.nearest(data_dir)
    is_ours = os.geteuid() == 0 or os.access(nearest, os.W_OK | os.X_OK)
    return nearest if is_ours else Path(tempfile.gettempdir())


@attrs.frozen
class _Place:
    """Directories on one file system are the same place."""

    device: int
    path: Path = attrs.field(eq=False)
    host: Host = attrs.field(eq=False)


class _Lacks(Exception):
    """Something does not work; not remembered, so that it can be mended and tried again."""

    def __init__(self, probed: Probed) -> None:
        super().__init__()
        self.probed = probed


def _try_once(place: _Place) -> Probed:
    try:
        return _tried(place)
    except _Lacks as lacks:
        return lacks.probed


@functools.lru_cache(maxsize=8)
def _tried(place: _Place) -> Probed:
    probed = probe(place.path, place.host)
    if any(check.verdict in (Verdict.MISSING, Verdict.NOT_TRIED) for check in probed.checks):
        raise _Lacks(probed)
    return probed


def probe(directory: Path, host: Host | None = None, *, thorough: bool = False) -> Probed:
    """Let nsinit's probe make its trials in a directory of its own below `directory`."""
    host = read_host() if host is None else host
    command = [sys.executable, "-I", "-S", "-B", str(_PROBE), str(directory), *(["thorough"] if thorough else [])]
    try:
        done = subprocess.run(command, capture_output=True, cwd="/", env={"LANG": "C.UTF-8"}, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probed([fails("probe", f"the probe did not answer: {error}")])
    try:
        answers = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Probed([fails("probe", f"nothing can be tried in {directory}: {reason}")])
    facts = {name: value for answer in answers.values() for name, value in answer["facts"].items()}
    return Probed([_judge(check_id, answer, host) for check_id, answer in answers.items()], facts)


def _judge(check_id: str, answer: Mapping[str, Any], host: Host) -> Check:  # JSON values
    verdict, seen, number = Verdict(answer["verdict"]), str(answer["seen"]), int(answer["errno"])
    if verdict is Verdict.WORKS:
        return works(check_id, seen)
    fix = advise(check_id, number, host, CATALOGUE[check_id].fix)
    if verdict is Verdict.MISSING and number in _REFUSED and host.euid != 0:
        return fails(
            check_id, f"not tried: takes root ({seen})", fix="run this as root (sudo)", verdict=Verdict.NOT_TRIED
        )
    return fails(check_id, seen, fix=fix, verdict=verdict)
