"""Address space layouts of PID 1s and commands, compared with the decision record on forks without exec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.harness import Nsinit, data_directory, host_plan, running

_MAPPING = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ r\S+ .*/libc[.-]\S*$", re.MULTILINE)


@pytest.fixture(scope="module")
def server() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir) as nsinit:
        yield nsinit


def _libc(maps: str) -> str:
    """Return where the C library begins."""
    match = _MAPPING.search(maps)
    assert match is not None, maps
    return match[1]


def test_init_processes_share_the_layout_of_nsinit_and_commands_do_not(server: Nsinit) -> None:
    """PID 1 of each session is where nsinit is; of four commands, each was loaded somewhere else."""
    first, second = server.build(host_plan()), server.build(host_plan())
    inits = {_libc(Path(f"/proc/{pid}/maps").read_text()) for pid in (server.pid, first.pid, second.pid)}
    commands = [_libc(box.run("cat /proc/self/maps").out) for box in (first, second) for _ in range(2)]
    assert len(inits) == 1
    assert len({*inits, *commands}) == 5
    first.teardown()
    second.teardown()


@pytest.mark.parametrize("name", ["maps", "smaps", "auxv", "stat", "syscall", "stack", "mem", "map_files", "exe"])
def test_the_layout_of_pid_1_can_not_be_read_inside(server: Nsinit, name: str) -> None:
    """No file of /proc/1 can be opened by a command, for which there is no such name."""
    box = server.build(host_plan())
    result = box.run(f"cat /proc/1/{name} || ls /proc/1/{name}")
    assert (result.code != 0, result.out) == (True, "")
    assert "No such file or directory" in result.err
    box.teardown()
