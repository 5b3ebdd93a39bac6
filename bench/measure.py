"""Costs of the machine itself, and readings of its memory and processes."""

from __future__ import annotations

import fcntl
import os
import socket
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope through (x, y) points."""
    xs, ys = zip(*points, strict=True)
    return statistics.linear_regression(xs, ys).slope


def fork_and_wait() -> None:
    """Fork this process and reap the child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def run_true() -> None:
    """Start and reap the machine's own `/bin/true`."""
    subprocess.run(["/bin/true"], check=True)


@contextmanager
def loopback() -> Iterator[Callable[[], None]]:
    """Yield a function that sends one byte to a process over TCP and waits for it to come back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pid = os.fork()
        if pid == 0:
            _echo(server)
        with socket.create_connection(server.getsockname()) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def round_trip() -> None:
                client.sendall(b"x")
                client.recv(1)

            yield round_trip
        os.waitpid(pid, 0)


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(1):
        connection.sendall(data)
    os._exit(0)


KSM = Path("/sys/kernel/mm/ksm")


@contextmanager
def merging() -> Iterator[Callable[[], int]]:
    """Have the kernel merge pages, and yield a function that returns how often it has looked at all that are offered;
    afterwards it does what it did before. Waits for others who do the same.

    Raises:
        OSError: this kernel can't merge pages, or its settings can't be changed here.
    """
    with (KSM / "run").open("r+") as switch:
        fcntl.flock(switch, fcntl.LOCK_EX)
        before = {name: (KSM / name).read_text() for name in ("pages_to_scan", "run")}
        try:
            (KSM / "pages_to_scan").write_text("20000")
            (KSM / "run").write_text("1")
            yield lambda: int((KSM / "full_scans").read_text())
        finally:
            for name, value in before.items():
                (KSM / name).write_text(value)


def resident_bytes(root: int) -> int:
    """Return the proportional set size of `root` and all its descendants."""
    return sum(_pss(pid) for pid in family(root))


def own_resident_bytes(pid: int) -> int:
    """Return the resident set size of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kernel_bytes() -> int:
    """Return what the kernel uses for its own structures and for tmpfs, on the whole machine."""
    fields = _memory()
    return sum(fields[name] for name in ("Slab", "KernelStack", "PageTables", "Percpu", "Shmem"))


def available_bytes() -> int:
    """Return the memory that programs can still get without swapping, on the whole machine."""
    return _memory()["MemAvailable"]


def _memory() -> dict[str, int]:
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields


def family(root: int) -> set[int]:
    """Return the pids of `root` and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # the process ended meanwhile
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def busy_s() -> float:
    """Return the processor time that the machine used so far."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    busy = sum(int(field) for position, field in enumerate(fields) if position not in (3, 4))  # idle, iowait
    return busy / os.sysconf("SC_CLK_TCK")
