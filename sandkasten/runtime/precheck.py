"""Examines the machine: reads what can be read and lets `nsinit/probe.py` try the rest. Changes nothing that stays.

Used at start, by `sandkasten doctor` and by `/v1/system`. The facts a person can act on (who runs this, where the data
directory is) come first, so that a failed system call is the last resort for an explanation, not the first.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from nsinit import protocol as nsinit_protocol
from sandkasten.machine import Check, Machine, Verdict
from sandkasten.runtime import host_checks
from sandkasten.runtime.checks import fails, judged

_PROBE = Path(nsinit_protocol.__file__).with_name("probe.py")
_PROBE_S = 30


@attrs.frozen
class Probed:
    """What the probe answered."""

    checks: list[Check]
    facts: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values


def examine(data_dir: Path) -> Machine:
    """Return the examination of this machine for that data directory, which need not exist.

    A process examines once for each file system: what a kernel can do does not change while it runs.
    """
    place = host_checks.nearest(data_dir)
    tried = _try_once(_Place(place.stat().st_dev, place)) if os.geteuid() == 0 else Probed([])
    return Machine(datetime.now(UTC), [*host_checks.read_all(data_dir), *tried.checks], tried.facts)


@attrs.frozen
class _Place:
    """Directories on one file system are the same place."""

    device: int
    path: Path = attrs.field(eq=False)


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
    probed = probe(place.path)
    if any(check.verdict is not Verdict.WORKS for check in probed.checks):
        raise _Lacks(probed)
    return probed


def probe(directory: Path) -> Probed:
    """Let nsinit's probe try the privileged steps in a directory of its own below `directory`."""
    command = [sys.executable, "-I", "-S", "-B", str(_PROBE), str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, cwd="/", env={"LANG": "C.UTF-8"}, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probed([fails("probe", f"the probe did not answer: {error}")])
    try:
        results = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Probed([fails("probe", f"nothing can be tried in {directory}: {reason}")])
    checks = [judged(name, bool(found["ok"]), str(found["detail"])) for name, found in results.items()]
    return Probed(checks)
