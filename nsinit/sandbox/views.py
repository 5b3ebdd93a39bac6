"""The files by which programs inside see how large their machine is: the session's memory and processors.

A session has files of its own in place of `/proc/meminfo`, `cpuinfo`, `stat` and the list of processors in `/sys`. They
say what the limits allow, as if all of it were free: a reading of what is used is in `/sys/fs/cgroup`, which has the
session's own part of the cgroup trees, read-only. The files lie in a directory of the session's `/run` and are written
again when limits change. Owned by the machine's root, who has no number inside, they can't be made by anybody there.
Sources: proc_meminfo(5), proc_cpuinfo(5), proc_stat(5); Documentation/ABI/testing/sysfs-devices-system-cpu; cgroups(7).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nsinit.storage.paths import open_in_root

DIRECTORY = "run/sandkasten/views"
PLACES = {
    "meminfo": "proc/meminfo",
    "cpuinfo": "proc/cpuinfo",
    "stat": "proc/stat",
    "online": "sys/devices/system/cpu/online",
}
"""The files of a session, and where programs look for them."""
RESOLVER = {"resolv.conf": "etc/resolv.conf"}
"""One more, of a session whose root is read-only: its name server may change all the same."""
TRUST = "trust.pem"
"""Another, of a session with secrets: the certificates of authorities that its programs are told to trust."""

_OF_LIMIT = frozenset({b"MemTotal", b"MemFree", b"MemAvailable"})
_OF_MACHINE = frozenset({b"Hugepagesize", b"VmallocTotal"})
_WRITE = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class MachineSize:
    """The machine's own files, read once: names of memory counters, paragraphs of processors, and `/proc/stat` as if
    nothing had happened."""

    meminfo: tuple[bytes, ...]
    cpuinfo: tuple[bytes, ...]
    calm_stat: tuple[bytes, ...]

    def views(self, memory_bytes: int, processors: Collection[int]) -> Mapping[str, bytes]:
        """Return the contents of a session's files."""
        return {
            "meminfo": b"".join(_counter(line, memory_bytes) for line in self.meminfo),
            "cpuinfo": b"".join(each + b"\n\n" for each in self.cpuinfo if _is_of(each, processors)),
            "stat": _stat(self.calm_stat, processors),
            "online": ",".join(map(str, sorted(processors))).encode() + b"\n",
        }


def read_machine_size(calm_stat: bytes) -> MachineSize:
    """Read the machine's own files."""
    meminfo, cpuinfo = (_read(f"/proc/{name}") for name in ("meminfo", "cpuinfo"))
    return MachineSize(
        tuple(meminfo.splitlines()), tuple(cpuinfo.rstrip().split(b"\n\n")), tuple(calm_stat.splitlines())
    )


def write(root_fd: int, contents: Mapping[str, bytes]) -> None:
    """Make the files of a session whose root no foreign code has seen."""
    directory_fd = open_in_root(root_fd, DIRECTORY, os.O_PATH | os.O_DIRECTORY)
    try:
        for name, content in contents.items():
            fd = os.open(name, _WRITE | os.O_CREAT | os.O_EXCL, 0o444, dir_fd=directory_fd)
            try:
                os.fchmod(fd, 0o444)
                os.write(fd, content)
            finally:
                os.close(fd)
    finally:
        os.close(directory_fd)


def rewrite(root_fd: int, contents: Mapping[str, bytes]) -> None:
    """Write the files of a running session again. Raises `OSError`: one of them is not the file that was made."""
    for name, content in contents.items():
        fd = open_in_root(root_fd, f"{DIRECTORY}/{name}", _WRITE)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != 0:
                raise OSError(errno.EPERM, "not the file that was made", name)
            os.pwrite(fd, content, 0)
            os.ftruncate(fd, len(content))
        finally:
            os.close(fd)


def _counter(line: bytes, memory_bytes: int) -> bytes:
    name, _, rest = line.partition(b":")
    if name in _OF_MACHINE:
        return line + b"\n"
    unit = b" kB" if rest.endswith(b"kB") else b""
    value = memory_bytes // 1024 if name in _OF_LIMIT else 0
    return b"%s%*d%s\n" % (name + b":", 23 - len(name), value, unit)


def _is_of(paragraph: bytes, processors: Collection[int]) -> bool:
    """Return whether a paragraph is about one of the processors, or about none (the last one on arm)."""
    name, _, rest = paragraph.partition(b"\n")[0].partition(b":")
    return name.strip() != b"processor" or int(rest) in processors


def _stat(calm: tuple[bytes, ...], processors: Collection[int]) -> bytes:
    """Return the lines of these processors, with their sum."""
    wanted = {b"cpu%d" % number for number in processors}
    kept = [line for line in calm if not line.startswith(b"cpu") or line.split(b" ", 1)[0] in wanted]
    of_processors = [tuple(map(int, line.split()[1:])) for line in kept if line.startswith(b"cpu")]
    total = b" ".join((b"cpu ", *(b"%d" % sum(column) for column in zip(*of_processors, strict=True))))
    return b"".join(line + b"\n" for line in (total, *kept))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
