"""Programs size themselves by the session's limits: processors, memory, cgroups, and what runtimes make of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.model import ExecSpec, Limits, SessionPatch, SessionSpec
from tests.file_requests import written

SMALL = Limits(cpu=1.0, memory_mb=256)
MANY = len(os.sched_getaffinity(0))
COUNT = """
import os
print(os.cpu_count(), len(os.sched_getaffinity(0)), getattr(os, "process_cpu_count", lambda: 1)())
"""
NODE = """
const os = require("os"), heap = require("v8").getHeapStatistics().heap_size_limit
console.log(os.availableParallelism(), os.cpus().length, heap <= 300 * 2 ** 20, os.totalmem() / 2 ** 20)
"""
JAVA = """public class Size { public static void main(String[] none) {
    var here = Runtime.getRuntime();
    System.out.println(here.availableProcessors() + " " + (here.maxMemory() <= 256 << 20));
} }"""
GO = """package main
import "runtime"
func main() { println(runtime.GOMAXPROCS(0), runtime.NumCPU()) }
"""


async def _said(supervisor: LocalSupervisor, session_id: str, command: str) -> str:
    result = await supervisor.exec(session_id, ExecSpec(command))
    assert result.end.exit_code == 0, result.output.decode()
    return result.stdout.decode()


async def _size(supervisor: LocalSupervisor, session_id: str) -> tuple[int, int, int, int]:
    """Return processors by affinity, by /proc/cpuinfo and by /proc/stat, and MiB of memory."""
    command = (
        "nproc; grep -c ^processor /proc/cpuinfo; grep -c '^cpu[0-9]' /proc/stat; awk '/^MemTotal/{print $2}' "
        "/proc/meminfo"
    )
    bound, listed, counted, kib = map(int, (await _said(supervisor, session_id, command)).split())
    return bound, listed, counted, kib // 1024


@pytest.mark.cgroup_v2
async def test_programs_find_the_limits(supervisor: LocalSupervisor) -> None:
    """By the tools and by Python."""
    session = await supervisor.create(SessionSpec(limits=SMALL))
    assert await _size(supervisor, session.id) == (1, 1, 1, 256)
    assert await _said(supervisor, session.id, f"python3 -c '{COUNT}'") == "1 1 1\n"
    await supervisor.destroy(session.id)


@pytest.mark.parametrize(
    ("program", "command", "expected"),
    [
        ("free", "free -m | awk '/^Mem/{print $2}'", "256\n"),
        ("node", f"node -e '{NODE}'", "1 1 true 256\n"),
        ("javac", f"cd /tmp; echo '{JAVA}' > Size.java; java Size.java", "1 true\n"),
    ],
)
async def test_a_program_of_the_machine_finds_the_limits(
    supervisor: LocalSupervisor, program: str, command: str, expected: str
) -> None:
    """A runtime sizes its threads and its heap by them."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    session = await supervisor.create(SessionSpec(limits=SMALL))
    assert await _said(supervisor, session.id, command) == expected
    await supervisor.destroy(session.id)


@pytest.mark.skipif(shutil.which("go") is None, reason="go is not installed")
async def test_go_finds_the_limits(supervisor: LocalSupervisor, tmp_path: Path) -> None:
    """One thread of Go code for each processor that the session may fill, whether this Go reads the limit or counts
    processors; the program is built outside, for its compiler needs more memory than this session has."""
    (tmp_path / "size.go").write_text(GO)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CGO_ENABLED": "0", "GO111MODULE": "off"}
    await trio.run_process(["go", "build", "size.go"], cwd=tmp_path, env=environment)
    for limits in (SMALL, attrs.evolve(SMALL, cpu=float(MANY))):
        session = await supervisor.create(SessionSpec(limits=limits))
        await written(supervisor.files(session.id), "size", (tmp_path / "size").read_bytes())
        count = int(limits.cpu)
        assert await _said(supervisor, session.id, "chmod +x size; ./size 2>&1") == f"{count} {count}\n"


@pytest.mark.cgroup_v2
async def test_a_change_of_limits_shows(config: Config) -> None:
    """To programs that run already, too, and as well after a restart of all of the daemon."""
    config = attrs.evolve(config, sessions_on_stop="keep")
    more = attrs.evolve(SMALL, cpu=MANY - 0.5, memory_mb=384)
    async with open_supervisor(config) as first:
        session = await first.create(SessionSpec(limits=SMALL))
        await _said(first, session.id, "sleep 1000 & sleeping=$!")
        await first.update(session.id, SessionPatch(limits=more))
        assert await _size(first, session.id) == (MANY, MANY, MANY, 384)
        allowed = await _said(first, session.id, "grep Cpus_allowed_list /proc/$sleeping/status")
        assert sum(map(_length, allowed.split()[1].split(","))) == MANY
    config = attrs.evolve(config, sessions_on_stop="destroy")
    async with open_supervisor(config) as second:
        assert await _size(second, session.id) == (MANY, MANY, MANY, 384)
        await second.update(session.id, SessionPatch(limits=SMALL))
        assert await _size(second, session.id) == (1, 1, 1, 256)
        assert await _said(second, session.id, "cat /sys/devices/system/cpu/online") == await _said(
            second, session.id, "awk '/^Cpus_allowed_list/{print $2}' /proc/$sleeping/status"
        )


def _length(part: str) -> int:
    low, _, high = part.partition("-")
    return int(high or low) - int(low) + 1


@pytest.mark.cgroup_v2
async def test_a_sandbox_of_the_pool_has_the_limits_of_its_session(config: Config) -> None:
    """Not those that it was made with."""
    config = attrs.evolve(config, server=attrs.evolve(config.server, pool_sandboxes=2))
    async with open_supervisor(config) as supervisor:
        for limits in (SMALL, attrs.evolve(SMALL, cpu=float(MANY), memory_mb=128)):
            session = await supervisor.create(SessionSpec(limits=limits))
            bound, *counted, memory_mb = await _size(supervisor, session.id)
            assert ({bound, *counted}, memory_mb) == ({int(limits.cpu)}, limits.memory_mb)


@pytest.mark.cgroup_v2
@pytest.mark.skipif(MANY < 2, reason="needs two processors")
async def test_two_sessions_have_a_processor_each(supervisor: LocalSupervisor) -> None:
    """A session that ends makes room for the next."""
    names = "awk '/^Cpus_allowed_list/{print $2}' /proc/self/status"
    sessions = [await supervisor.create(SessionSpec(limits=SMALL)) for _ in range(2)]
    first, second = [await _said(supervisor, each.id, names) for each in sessions]
    assert first != second
    await supervisor.destroy(sessions[0].id)
    third = await supervisor.create(SessionSpec(limits=SMALL))
    assert await _said(supervisor, third.id, names) == first


@pytest.mark.cgroup_v2
async def test_the_cgroups_inside_are_the_session_s_own_and_read_only(supervisor: LocalSupervisor) -> None:
    """The limit can be read. Nothing can be written, by root either, and no process of another session is listed."""
    session, other = [await supervisor.create(SessionSpec(limits=SMALL)) for _ in range(2)]
    memory = "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null"
    assert await _said(supervisor, session.id, f"{memory}; true") == f"{256 << 20}\n"
    write = "find /sys -type f -writable; find /sys -type d -exec mkdir {}/own \\; 2>/dev/null; find /sys -name own"
    result = await supervisor.exec(session.id, ExecSpec(write, user="root", stateless=True))
    assert result.stdout == b""
    listed = "cat $(find /sys -name cgroup.procs -o -name tasks) | sort -n | uniq"
    assert "0" not in (await _said(supervisor, session.id, listed)).split()
    names = (await _said(supervisor, session.id, "find /sys /proc/self/cgroup /proc/self/mountinfo -type f")).split()
    text = await _said(supervisor, session.id, "cat /proc/self/cgroup /proc/self/mountinfo")
    assert not [each for each in (*names, text) if other.id in each or session.id in each or "sandkasten-" in each]
