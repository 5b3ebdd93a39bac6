"""Counters of one session's cgroup and of its PID 1, in cgroup v2, hybrid and v1. Reads only; nsinit writes.

`CgroupStats` reads the whole session: each counter is a file that stays open for the session's life, so that a reading
is one `pread` of a few microseconds. Its `groups` read the run cgroups below the session's, one for each program and
named shell (`nsinit/cgroup/run_cgroups.py`). These have no controller, but in a v2 hierarchy, mounted alone or beside
v1, the kernel keeps their CPU time all the same. `read_raw` opens every file anew and returns the kernel's own names,
for the diagnosis of a session. A counter that the kernel does not have is `UNKNOWN`; no reading raises.

Sources: Documentation/admin-guide/cgroup-v2.rst ("cpu.stat" is there whether the controller is enabled or not);
Documentation/admin-guide/cgroup-v1/{memory,cpuacct,pids}.rst; Documentation/accounting/psi.rst;
Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat".
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence

import attrs

from sandkasten.model import Limits, Pressure, SessionStats, Stall

UNKNOWN = -1
_MIB = 1024 * 1024
_READ_BYTES = 4096
_MEMBERS_BYTES = 4096
_CPU_STEP = 1e-5
"""A quota is whole microseconds of a period of 100 ms."""

_V1_UNLIMITED = 1 << 62
"""In v1 no limit is the highest number of whole pages."""


@attrs.frozen
class UsageReading:
    """Counters at one moment: CPU time of the session's life in µs, memory now and at its highest in bytes."""

    cpu_usec: int
    memory_bytes: int
    memory_peak_bytes: int


class CgroupStats:
    """Open counters of one session. `close` frees the descriptors."""

    def __init__(self, dirs: Mapping[str, str], session_id: str) -> None:
        """`dirs` maps `unified` and controllers to the directory that holds session cgroups (`Ready.cgroup_dirs`); a
        controller whose directory is the unified one is a v2 controller."""
        unified = dirs.get("unified")
        v1 = {name: path for name, path in dirs.items() if name == "unified" or path != unified}
        self._dirs = {name: f"{path}/{session_id}" for name, path in v1.items()}
        self._has_io = "io" in dirs
        self._fds: dict[tuple[str, str], int | None] = {}
        self.groups = GroupStats(self._dirs.get("unified"))
        self._init_pid = 0

    def follow_init(self, pid: int) -> None:
        """Read the CPU time of that process as PID 1's; `pid` is as the daemon sees it."""
        self._init_pid = pid

    def read_usage(self) -> UsageReading:
        """Return the counters that a run is charged by; cheap enough for the hot path."""
        return UsageReading(self._cpu_usec(), self._memory(), self._memory_peak())

    def read_use(self) -> tuple[int, int]:
        """Return processor time, in µs, and memory, in bytes: two files of the three of `read_usage`."""
        return self._cpu_usec(), self._memory()

    def read_init_cpu(self) -> int:
        """Return the CPU time of PID 1 itself, in µs."""
        try:
            with open(f"/proc/{self._init_pid}/schedstat", "rb", buffering=0) as file:
                return int(file.read(_READ_BYTES).split()[0]) // 1000
        except (OSError, ValueError, IndexError):  # PID 1 has ended, or the kernel was built without SCHED_INFO
            return UNKNOWN

    def read_oom_kills(self) -> int:
        """Return how many processes of the session the kernel killed for memory."""
        if self._has_v2("memory"):
            return self._field("unified", "memory.events", "oom_kill")
        return self._field("memory", "memory.oom_control", "oom_kill")

    def read_pids_refused(self) -> int:
        """Return how many forks the pids limit refused.

        In v1 the kernel counts them where the forking process was, which may be a run cgroup below the session.
        """
        session = self._field(self._home("pids"), "pids.events", "max")
        is_flat = "unified" in self._dirs or session < 0  # there the run cgroups are in the v2 tree
        return session if is_flat else session + self._groups_refused()

    def read_processes(self) -> int:
        """Count the processes and threads of the session, zombies included."""
        return self._number(self._home("pids"), "pids.current")

    def read_all(self) -> SessionStats:
        """Return every counter."""
        cpu, pids, io = self._home("cpu"), self._home("pids"), self._read_io()
        return SessionStats(
            memory_bytes=_known(self._memory()),
            memory_limit=_known(self._memory_limit()),
            memory_peak_bytes=_known(self._memory_peak()),
            oom_kills=_known(self.read_oom_kills()),
            cpu_usage_usec=_known(self._cpu_usec()),
            cpu_limit=self._cpu_limit(),
            cpu_periods=_known(self._field(cpu, "cpu.stat", "nr_periods")),
            cpu_throttled=_known(self._field(cpu, "cpu.stat", "nr_throttled")),
            cpu_throttled_usec=_known(self._throttled_usec()),
            pids=_known(self.read_processes()),
            pids_limit=_known(self._number(pids, "pids.max")),
            pids_peak=_known(self._number(pids, "pids.peak")),
            pids_refused=_known(self.read_pids_refused()),
            io_read_bytes=io[0],
            io_write_bytes=io[1],
            io_reads=io[2],
            io_writes=io[3],
            cpu_pressure=parse_pressure(self._read("unified", "cpu.pressure")),
            memory_pressure=parse_pressure(self._read("unified", "memory.pressure")),
            io_pressure=parse_pressure(self._read("unified", "io.pressure")),
        )

    def read_limits(self, recorded: Limits) -> Limits:
        """Return the limits in force; limits that no cgroup holds come from `recorded`."""
        memory, cpu, pids = self._memory_limit(), self._cpu_limit(), self._number(self._home("pids"), "pids.max")
        return attrs.evolve(
            recorded,
            memory_mb=memory // _MIB if memory >= _MIB else recorded.memory_mb,
            cpu=recorded.cpu if cpu is None or abs(cpu - recorded.cpu) < _CPU_STEP else cpu,
            pids=pids if pids > 0 else recorded.pids,
        )

    def close(self) -> None:
        self.groups.close()
        for fd in self._fds.values():
            if fd is not None:
                os.close(fd)
        self._fds.clear()

    def _has_v2(self, controller: str) -> bool:
        return controller not in self._dirs

    def _home(self, controller: str) -> str:
        return controller if controller in self._dirs else "unified"

    def _memory(self) -> int:
        if self._has_v2("memory"):
            return self._number("unified", "memory.current")
        return self._number("memory", "memory.usage_in_bytes")

    def _memory_peak(self) -> int:
        if self._has_v2("memory"):
            return self._number("unified", "memory.peak")
        return self._number("memory", "memory.max_usage_in_bytes")

    def _memory_limit(self) -> int:
        if self._has_v2("memory"):
            return self._number("unified", "memory.max")
        limit = self._number("memory", "memory.limit_in_bytes")
        return limit if limit < _V1_UNLIMITED else UNKNOWN

    def _cpu_limit(self) -> float | None:
        """The quota in cores; None when there is none."""
        if self._has_v2("cpu"):
            quota, _, period = self._read("unified", "cpu.max").strip().partition(" ")
        else:
            quota, period = (self._read("cpu", f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None

    def _throttled_usec(self) -> int:
        if self._has_v2("cpu"):
            return self._field("unified", "cpu.stat", "throttled_usec")
        nanoseconds = self._field("cpu", "cpu.stat", "throttled_time")
        return nanoseconds // 1000 if nanoseconds >= 0 else UNKNOWN

    def _cpu_usec(self) -> int:
        if "unified" in self._dirs:
            return self._field("unified", "cpu.stat", "usage_usec")
        nanoseconds = self._number("cpuacct", "cpuacct.usage")
        return nanoseconds // 1000 if nanoseconds >= 0 else UNKNOWN

    def _read_io(self) -> Sequence[int | None]:
        """Return bytes read and written, and the numbers of reads and writes."""
        if "blkio" in self._dirs:
            texts = (self._read("blkio", f"blkio.throttle.{name}") for name in ("io_service_bytes", "io_serviced"))
            return [_io_sum(text, kind) for text in texts for kind in ("Read", "Write")]
        return parse_io_stat(self._read("unified", "io.stat")) if self._has_io else [None] * 4

    def _groups_refused(self) -> int:
        """Sum over the run cgroups. They come and go, so none of their files is kept open."""
        refused = 0
        with contextlib.suppress(OSError), os.scandir(self._dirs["pids"]) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError), open(f"{entry.path}/pids.events", "rb", buffering=0) as file:
                        refused += max(0, _field_of(file.read(_READ_BYTES).decode("ascii"), "max"))
        return refused

    def _number(self, home: str, name: str) -> int:
        try:
            return int(self._read(home, name))
        except ValueError:  # "max" is no limit
            return UNKNOWN

    def _field(self, home: str, name: str, key: str) -> int:
        return _field_of(self._read(home, name), key)

    def _read(self, home: str, name: str) -> str:
        fd = self._fds[home, name] if (home, name) in self._fds else self._open(home, name)
        try:
            return os.pread(fd, _READ_BYTES, 0).decode("ascii") if fd is not None else ""
        except OSError:  # ENODEV: the cgroup is gone; EOPNOTSUPP: pressure is not accounted (kernel option psi=0)
            return ""

    def _open(self, home: str, name: str) -> int | None:
        """Open a counter and remember it; None where the kernel has no such file."""
        fd = None
        if home in self._dirs:
            try:
                fd = os.open(f"{self._dirs[home]}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP):  # out of descriptors: another time perhaps
                    return None
        self._fds[home, name] = fd
        return fd


def _known(number: int) -> int | None:
    return None if number == UNKNOWN else number


def _field_of(text: str, key: str) -> int:
    for line in text.splitlines():
        label, _, value = line.partition(" ")
        if label == key and value.isdigit():
            return int(value)
    return UNKNOWN


_LOOP = "7:"
"""Major number of loop devices: what passes through one is counted again at the disk below."""


def parse_io_stat(text: str) -> list[int]:
    """Return bytes read and written and the numbers of both, of all disks together (cgroup-v2.rst, "io.stat")."""
    sums = [0, 0, 0, 0]
    for line in text.splitlines():
        device, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields if "=" in field)
        if not device.startswith(_LOOP):
            for place, name in enumerate(("rbytes", "wbytes", "rios", "wios")):
                sums[place] += int(values.get(name, 0))
    return sums


def _io_sum(text: str, kind: str) -> int:
    lines = (line.split() for line in text.splitlines())
    return sum(int(fields[2]) for fields in lines if fields[1:2] == [kind] and not fields[0].startswith(_LOOP))


def parse_pressure(text: str) -> Pressure | None:
    """Return the content of a pressure file, None if there is none (Documentation/accounting/psi.rst)."""
    kinds: dict[str, Stall] = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields if "=" in field)
        if kind in ("some", "full") and values.keys() >= _STALL_FIELDS:
            ten, sixty, three_hundred = (float(values[name]) for name in ("avg10", "avg60", "avg300"))
            kinds[kind] = Stall(ten, sixty, three_hundred, total_usec=int(values["total"]))
    return Pressure(**kinds) if kinds else None


_STALL_FIELDS = {"avg10", "avg60", "avg300", "total"}

# Run cgroups

_CPU_BYTES = 512
_USAGE = b"usage_usec "


class GroupStats:
    """CPU time and processes of the run cgroups of one session.

    `directory` is the session's in the v2 hierarchy; None on a machine without one, where nothing is known.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._fds: dict[str, int] = {}

    @property
    def is_known(self) -> bool:
        """Whether the kernel keeps CPU time for each run cgroup."""
        return self._directory is not None

    def list(self) -> list[str]:
        """Return the names of the run cgroups."""
        if self._directory is None:
            return []
        try:
            with os.scandir(self._directory) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []

    def cpu_usec(self, name: str) -> int:
        """Return the CPU time ever used in a run cgroup, in µs; `UNKNOWN` when there is no such cgroup."""
        try:
            # Reading from offset 0 makes the kernel write the file anew.
            _, found, rest = os.pread(self._open(name), _CPU_BYTES, 0).partition(_USAGE)
        except OSError:
            return UNKNOWN
        digits = rest.partition(b"\n")[0]
        return int(digits) if found and digits.isdigit() else UNKNOWN

    def count_processes(self, name: str | None) -> int:
        """Count the processes in a run cgroup, or with None in the session's own; a few hundred at most are counted."""
        place = "cgroup.procs" if name is None else f"{name}/cgroup.procs"
        try:
            with open(self._path(place), "rb", buffering=0) as file:
                content = file.read(_MEMBERS_BYTES) or b""
        except OSError:
            return UNKNOWN
        return content.count(b"\n") if content else UNKNOWN

    def forget(self, name: str) -> None:
        """Close the file of a run cgroup that is gone or no longer read."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for name in list(self._fds):
            self.forget(name)

    def _open(self, name: str) -> int:
        fd = self._fds.get(name)
        if fd is None:
            fd = self._fds[name] = os.open(self._path(f"{name}/cpu.stat"), os.O_RDONLY | os.O_CLOEXEC)
        return fd

    def _path(self, path: str) -> str:
        if self._directory is None:
            raise FileNotFoundError(errno.ENOENT, "no v2 hierarchy")
        return f"{self._directory}/{path}"


# Every file, for a person

FILES: Mapping[str, tuple[str, ...]] = {
    "unified": (
        *("cgroup.events", "cgroup.freeze", "cpu.stat", "cpu.max", "cpu.weight"),
        *("memory.current", "memory.peak", "memory.max", "memory.events", "pids.current", "pids.peak", "pids.max"),
        *("pids.events", "cpu.pressure", "memory.pressure", "io.pressure"),
    ),
    "memory": ("memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"),
    "cpu": ("cpu.stat", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
    "cpuacct": ("cpuacct.usage",),
    "pids": ("pids.current", "pids.max", "pids.events"),
    "freezer": ("freezer.state",),
}
"""Files worth reading, by hierarchy."""


def read_raw(dirs: Mapping[str, str], session_id: str) -> dict[str, str | int | dict[str, str | int]]:
    """Return the counters by file; empty when no cgroup of that session is there."""
    found: dict[str, str | int | dict[str, str | int]] = {}
    unified = dirs.get("unified")
    for hierarchy, path in dirs.items():
        if hierarchy == "unified" or path != unified:
            for name in FILES.get(hierarchy, ()):
                text = _read(f"{path}/{session_id}/{name}")
                if text is not None and name not in found:
                    found[name] = _parse(text)
    return found


def _parse(text: str) -> str | int | dict[str, str | int]:
    """Return one value, or those of a file with a key on each line."""
    lines = [line.partition(" ") for line in text.splitlines()]
    if lines and all(rest and not key.lstrip("-").isdigit() for key, _, rest in lines):
        return {key: _number(rest) for key, _, rest in lines}
    return _number(text.strip())


def _number(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdecimal() else text


def _read(path: str) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(_READ_BYTES).decode("ascii", "replace")
    except OSError:
        return None
