"""Writes the limits of one session's cgroup, in the order that each cgroup version needs, all of them or none.

`first` is for a cgroup without processes, `raise_to` for one in use that loses no memory: both return at once, and the
cgroup maker calls them. `lower` makes the kernel reclaim pages first, which may take as long as the session makes new
ones: a fork of nsinit writes, and is killed after `CHANGE_DEADLINE_S`. No process is killed to make room.
Sources: Documentation/admin-guide/cgroup-v2.rst, "memory.max"; cgroup-v1/memory.rst §6; scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Generator
from dataclasses import dataclass

from nsinit.cgroup.session import SessionCgroup, number_in, read_file
from nsinit.kernel import syscalls
from nsinit.kernel.files import write_file
from nsinit.log import log
from nsinit.scheduler import Wait
from nsinit.wire.protocol import CgroupMode, Limits

CHANGE_DEADLINE_S = 5.0
_TCP_PART = 4
"""v1 charges what waits in TCP and UDP sockets apart from all other memory. A session may hold that part of its memory
limit, on top of it."""
_UNLIMITED = 1 << 62
"""v1 says a number that is little below 2^63, v2 "max"."""
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


@dataclass(frozen=True, slots=True)
class Setting:
    """A file and the text to write. `is_optional`: the file exists only where the kernel counts swap, or
    sockets."""

    path: str
    value: str
    is_optional: bool = False


def first(cgroup: SessionCgroup, limits: Limits) -> None:
    """Write all limits of a cgroup without processes. Raises `OSError`; then the cgroup must be removed."""
    _write(_settings(cgroup, limits, is_raising=False))


def part_in_use(directory: str, mode: CgroupMode) -> float | None:
    """Return the part of a memory limit that is in use and that the kernel can't reclaim; 0 without a limit, None if
    the directory could have none."""
    names = ("memory.max", "memory.current") if mode == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    if not (text := read_file(f"{directory}/{names[0]}")):
        return None
    limit = number_in(text)
    if not 0 < limit < _UNLIMITED:
        return 0
    used, counts = number_in(read_file(f"{directory}/{names[1]}")), read_file(f"{directory}/memory.stat")
    # v1 has names of their own for what cgroups below have, too.
    reclaimable = sum(max(0, number_in(counts, name), number_in(counts, f"total_{name}")) for name in _RECLAIMABLE)
    return max(0, used - reclaimable) / limit


def is_lower(cgroup: SessionCgroup, limits: Limits) -> bool:
    """Whether the limits allow less memory than now: such a change takes `lower`, and time."""
    return limits.memory_bytes < _current_bytes(cgroup)


def raise_to(cgroup: SessionCgroup, limits: Limits) -> None:
    """Write limits with no less memory than now. Raises `OSError`: nothing has changed."""
    settings = _settings(cgroup, limits, is_raising=limits.memory_bytes > _current_bytes(cgroup))
    before = _read(settings)
    try:
        _write(settings)
    except OSError:
        _restore(before)
        raise


def lower(cgroup: SessionCgroup, limits: Limits) -> Generator[Wait, bool, None]:
    """Write limits with less memory than now. Swap stays forbidden.

    Raises:
        OSError: nothing has changed. EBUSY: the session uses more memory than the new limit; ETIMEDOUT: the kernel
            could
        not reclaim enough in time; others: the kernel's own error.
    """
    settings = _settings(cgroup, limits, is_raising=False)
    before = _read(settings)
    try:
        _check_room(cgroup, limits)
        yield from _write_apart(settings)
    except OSError:
        _restore(before)
        raise


def _settings(cgroup: SessionCgroup, limits: Limits, *, is_raising: bool) -> tuple[Setting, ...]:
    """Return the settings in the order of writing; the ones that are refused most come first."""
    memory, cpu, amount = cgroup.directory("memory"), cgroup.directory("cpu"), str(limits.memory_bytes)
    pids = Setting(f"{cgroup.directory('pids')}/pids.max", str(limits.pids))
    if cgroup.tree.mode == "v2":
        return (
            Setting(f"{memory}/memory.max", amount),
            Setting(f"{memory}/memory.swap.max", "0", is_optional=True),
            Setting(f"{cpu}/cpu.max", f"{limits.cpu_quota_us} {limits.cpu_period_us}"),
            pids,
        )
    hard = Setting(f"{memory}/memory.limit_in_bytes", amount)
    with_swap = Setting(f"{memory}/memory.memsw.limit_in_bytes", amount, is_optional=True)
    # Any limit turns the charging on (cgroup-v1/memory.rst §2.7.1): without one, only the machine's own limit holds.
    sockets = Setting(
        f"{memory}/memory.kmem.tcp.limit_in_bytes", str(limits.memory_bytes // _TCP_PART), is_optional=True
    )
    return (
        Setting(f"{memory}/memory.swappiness", "0", is_optional=True),
        *((with_swap, hard) if is_raising else (hard, with_swap)),  # the hard one may never exceed the other
        sockets,
        Setting(f"{cpu}/cpu.cfs_period_us", str(limits.cpu_period_us)),
        Setting(f"{cpu}/cpu.cfs_quota_us", str(limits.cpu_quota_us)),
        pids,
    )


def _write(settings: tuple[Setting, ...]) -> None:
    for setting in settings:
        try:
            write_file(setting.path, setting.value)
        except FileNotFoundError:
            if not setting.is_optional:
                raise


def _read(settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """Return the present content of the files, which the kernel accepts back."""
    found = ((setting.path, read_file(setting.path).strip()) for setting in settings)
    return tuple(Setting(path, value) for path, value in found if value)


def _restore(before: tuple[Setting, ...]) -> None:
    """Write the earlier content back, last file first. Failures are logged; the daemon reads the limits in force."""
    for setting in reversed(before):
        try:
            write_file(setting.path, setting.value)
        except OSError as error:
            log("error", "limit not restored", path=setting.path, value=setting.value, reason=str(error))


def _write_apart(settings: tuple[Setting, ...]) -> Generator[Wait, bool, None]:
    """Write in a fork whose exit status is the errno. Raises `OSError`."""
    pid = os.fork()
    if pid == 0:
        _write_and_exit(settings)
    pidfd = os.pidfd_open(pid)
    try:
        is_done = yield Wait(fd=pidfd, timeout_s=CHANGE_DEADLINE_S)
        if not is_done:
            syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)  # makes the kernel give up reclaiming
            yield Wait(fd=pidfd)
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    finally:
        os.close(pidfd)
    if not is_done:
        raise TimeoutError(errno.ETIMEDOUT, "the session's memory could not be reclaimed in time", settings[0].path)
    status = result.si_status if result else errno.ECHILD
    if status:
        raise OSError(status, os.strerror(status), settings[0].path)


def _write_and_exit(settings: tuple[Setting, ...]) -> None:
    status = errno.EIO
    try:
        syscalls.close_range(3)  # a reclaim may take seconds: no descriptor of nsinit's stays open so long
        _write(settings)
        status = 0
    except OSError as error:
        status = error.errno or errno.EIO
    finally:
        os._exit(status)


def _current_bytes(cgroup: SessionCgroup) -> int:
    name = "memory.max" if cgroup.tree.mode == "v2" else "memory.limit_in_bytes"
    value = number_in(read_file(f"{cgroup.directory('memory')}/{name}"))
    return value if value >= 0 else 1 << 63  # "max"


def _check_room(cgroup: SessionCgroup, limits: Limits) -> None:
    """Raise `OSError` (EBUSY) if a v2 session uses more memory than the new limit and the kernel could not reclaim it.

    Writing a lower `memory.max` would invoke the OOM killer (cgroup-v2.rst). v1 refuses the write by itself.
    """
    if cgroup.tree.mode != "v2":
        return
    memory = cgroup.directory("memory")
    counts = read_file(f"{memory}/memory.stat")
    reclaimable = sum(max(number_in(counts, name), 0) for name in _RECLAIMABLE)
    if number_in(read_file(f"{memory}/memory.current")) - reclaimable > limits.memory_bytes:
        raise OSError(errno.EBUSY, "the session uses more memory than that", f"{memory}/memory.max")
