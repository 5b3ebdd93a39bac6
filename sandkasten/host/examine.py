"""The examination of a machine: reads facts, has nsinit's probe try the rest, and leaves no change behind.

Used at start, by `sandkasten doctor` and by `/v1/system`. `checks.py` has the checks and the meaning of each failure.
`write_machine` and `read_machine` hand an examination that root made to a daemon that is never root:
`<data_dir>/machine.json` belongs to root, and is believed only then.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from nsinit.wire import protocol as nsinit_protocol
from sandkasten.admission.budget import find_room
from sandkasten.config import Config, ConfigError
from sandkasten.counters.node import Bounds, read_totals
from sandkasten.host.checks import (
    CATALOGUE,
    REFUSED,
    Host,
    advise,
    check_bridge_way,
    check_merging,
    check_pools,
    check_room,
    check_sysctls,
    check_upstream,
    fails,
    nearest,
    read_host,
    works,
)
from sandkasten.model.node import Check, Machine, Verdict

_PROBE = Path(nsinit_protocol.__file__).parents[1] / "tools" / "probe.py"
_PROBE_S = 120
"""Longer than every trial's own deadline together; a healthy machine takes a third of a second."""

_MAX_MACHINE_BYTES = 1024 * 1024


def examine(data_dir: Path, *, config: Config | None = None, thorough: bool = False) -> Machine:
    """Return the examination of this machine for that data directory, which need not exist.

    The abilities of a kernel do not change while the kernel runs, so a process probes once for each file system, and
    again after a failed trial. With `thorough` every trial is made afresh, also those that take a moment or write to
    the kernel's log. With a `config` the examination also compares the machine's limits with `server.max_sessions`, and
    checks what the configuration's settings need.
    """
    host = read_host(data_dir)
    directory = _writable_place(data_dir)
    if thorough:
        tried = probe(directory, host, "thorough")
    else:
        has_bridge = config is not None and config.may_bridge
        tried = _probe_once(_ProbeKey(directory.stat().st_dev, has_bridge, directory, host))
    by_id = {check.id: check for check in tried.checks}
    by_id |= {check_id: row.read(host) for check_id, row in CATALOGUE.items() if row.read is not None}
    in_order = [by_id[check_id] for check_id in CATALOGUE if check_id in by_id]
    facts = {"container": host.container, "wsl": host.is_wsl, **tried.facts}
    pools = [] if config is None else _check_sessions(host, config)
    if config is not None and thorough and config.egress.upstream_proxy is not None:
        pools.append(check_upstream(config.egress.upstream_proxy))
    return Machine(datetime.now(UTC), [*in_order, *check_sysctls(host), *pools], facts)


def _check_sessions(host: Host, config: Config) -> list[Check]:
    """Compare the machine, without a cgroup above the sessions, with the sessions that there may be."""
    most = config.server.max_sessions
    totals = read_totals(nearest(config.data_dir), Bounds(), max_sessions=0)
    room = find_room(config, totals, descriptors=host.max_descriptors)
    merging = [check_merging(host)] if config.isolation.merge_pages else []
    way = [check_bridge_way(config.isolation.bridge_range)] if config.may_bridge else []
    return [check_room(room, most), *check_pools(host, most, config.defaults.pids_limit), *merging, *way]


def _writable_place(data_dir: Path) -> Path:
    """Return a directory for trials: on the data directory's file system, or a temporary one for an ordinary user."""
    found = nearest(data_dir)
    is_ours = os.geteuid() == 0 or os.access(found, os.W_OK | os.X_OK)
    return found if is_ours else Path(tempfile.gettempdir())


@attrs.frozen
class _ProbeKey:
    """The arguments of a probe, as the key of its cached answer: directories on one file system are equal."""

    device: int
    has_bridge: bool
    path: Path = attrs.field(eq=False)
    host: Host = attrs.field(eq=False)


@attrs.frozen
class Probed:
    """The answer of the probe: a check for each trial, and facts of the machine."""

    checks: list[Check]
    facts: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values


class _TrialFailed(Exception):
    """Carries an answer with a failed trial past the cache. The next examination probes again, since the machine may
    have been mended."""

    def __init__(self, probed: Probed) -> None:
        super().__init__()
        self.probed = probed


def _probe_once(key: _ProbeKey) -> Probed:
    """Return the answer of the probe, from the cache if every trial succeeded before."""
    try:
        return _cached_probe(key)
    except _TrialFailed as failed:
        return failed.probed


@functools.lru_cache(maxsize=8)
def _cached_probe(key: _ProbeKey) -> Probed:
    probed = probe(key.path, key.host, *(["bridge"] if key.has_bridge else []))
    if any(check.verdict in (Verdict.MISSING, Verdict.NOT_TRIED) for check in probed.checks):
        raise _TrialFailed(probed)
    return probed


def probe(directory: Path, host: Host | None = None, *wanted: str) -> Probed:
    """Let nsinit's probe make its trials in a directory of its own below `directory`. `wanted`: see there."""
    host = read_host(directory) if host is None else host
    command = [sys.executable, "-I", "-S", "-B", str(_PROBE), str(directory), *wanted]
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
    if verdict is Verdict.MISSING and number in REFUSED and host.euid != 0:
        untried = f"not tried: takes root ({seen})"
        return fails(check_id, untried, fix="run this as root (sudo)", verdict=Verdict.NOT_TRIED)
    return fails(check_id, seen, fix=advise(check_id, number, host), verdict=verdict)


def write_machine(path: Path, machine: Machine, *, gid: int) -> None:
    """Replace the file, whole or not at all; the group `gid` may read it."""
    checks = [attrs.asdict(check) for check in machine.checks]
    fields = {"examined_at": machine.examined_at.isoformat(), "checks": checks, "facts": dict(machine.facts)}
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(fields, file)
            os.fchown(fd, 0, gid)  # by descriptor and before the rename: no reader sees another owner
            os.fchmod(fd, 0o640)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read_machine(path: Path) -> Machine:
    """Return the examination that root wrote.

    Raises:
        ConfigError: there is no such file of root's, or another version wrote it.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if os.fstat(file.fileno()).st_uid != 0:
                raise ConfigError(f"{path} does not belong to root; remove it and restart `sandkasten nsinit`")
            fields = json.loads(file.read(_MAX_MACHINE_BYTES))
        checks = [Check(**each | {"verdict": Verdict(each["verdict"])}) for each in fields["checks"]]
        return Machine(datetime.fromisoformat(fields["examined_at"]), checks, fields["facts"])
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; is `sandkasten nsinit` running?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is of another version; restart `sandkasten nsinit`") from error
