"""Capacity of a node: the machine's, or less where a cgroup above the sessions says so."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from sandkasten.counters import node


def cgroup(directory: Path, files: Mapping[str, str]) -> Path:
    """Make a directory that looks like a cgroup."""
    directory.mkdir(parents=True)
    for name, content in {"cgroup.procs": "", **files}.items():
        (directory / name).write_text(content)
    return directory


def test_the_least_limit_above_the_sessions_is_what_the_node_has(tmp_path: Path) -> None:
    """Of a unit or a container; pages of files that nobody used for a while count as free."""
    cgroup(tmp_path / "unit", {"memory.max": "2000000\n", "memory.current": "1500000\n", "pids.max": "max\n"})
    (tmp_path / "unit/memory.stat").write_text("anon 5\ninactive_file 400000\n")
    inner = cgroup(tmp_path / "unit/inner", {"memory.max": "max\n", "pids.max": "100\n", "pids.current": "30\n"})
    bounds = node.read_bounds({"memory": str(inner), "pids": str(inner)})
    totals = node.read_totals(tmp_path, bounds, max_sessions=7)
    free = node.read_free(tmp_path, bounds)
    assert (totals.sessions, totals.memory_bytes, totals.pids) == (7, 2_000_000, 100)
    assert (free.memory_bytes, free.pids) == (900_000, 70)


def test_the_names_and_the_no_limit_of_the_older_hierarchy_are_known(tmp_path: Path) -> None:
    """No limit is a very large number there, and a cgroup's statistics have its children's beside its own."""
    stat = "inactive_file 1\ntotal_inactive_file 300000\n"
    files = {"memory.limit_in_bytes": "3000000", "memory.usage_in_bytes": "1000000", "memory.stat": stat}
    cgroup(tmp_path / "unit", files)
    inner = cgroup(tmp_path / "unit/inner", {"memory.limit_in_bytes": "9223372036854771712"})
    bounds = node.read_bounds({"memory": str(inner)})
    assert bounds == node.Bounds(memory=((str(tmp_path / "unit"), 3_000_000),))
    assert node.read_free(tmp_path, bounds).memory_bytes == 2_300_000


def test_without_such_a_limit_the_node_has_the_machine(tmp_path: Path) -> None:
    """Memory and process ids as the kernel tells them; less is free than there is."""
    totals = node.read_totals(tmp_path, node.Bounds(), max_sessions=1)
    free = node.read_free(tmp_path, node.Bounds())
    names = Path("/proc/meminfo").read_text().split()
    assert totals.memory_bytes == int(names[names.index("MemTotal:") + 1]) * 1024
    assert totals.pids is not None
    assert free.memory_bytes is not None
    assert free.pids is not None
    assert 0 < free.memory_bytes < totals.memory_bytes
    assert 0 < free.pids < totals.pids


@pytest.mark.parametrize(
    ("wanted", "pool", "expected"),
    [
        (100, 3072, (100, 16)),
        (1000, 3072, (1000, 3)),
        (5000, 3072, (1536, 2)),
        (10, 1, (1, 2)),
        (1000, 16000, (1000, 16)),
    ],
)
def test_terminals_are_divided_so_that_all_sessions_may_use_all_of_theirs(
    monkeypatch: pytest.MonkeyPatch, wanted: int, pool: int, expected: tuple[int, int]
) -> None:
    """The share of each gets smaller before the number of sessions does, and together they never pass the pool."""
    pools = {"/proc/sys/kernel/pty/max": pool + 1024, "/proc/sys/kernel/pty/reserve": 1024}
    monkeypatch.setattr(node, "_number", pools.get)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    sessions = min(node.session_bounds(wanted).values())
    assert (sessions, node.terminals_of(sessions)) == expected
    assert expected[0] == 1 or expected[0] * expected[1] <= pool


def test_descriptors_bound_the_sessions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer sessions have more terminals each; a kernel without the figures has enough."""
    monkeypatch.setattr(node, "_number", lambda _: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2100, 1 << 20))
    bounds = node.session_bounds(1000)
    assert bounds == {"server.max_sessions": 1000, "RLIMIT_NOFILE": 100}
    assert node.terminals_of(100) == 16


def test_descriptors_that_are_free_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/self/fd lists them; an older kernel tells no number."""
    before = node.free_descriptors()
    with open(os.devnull, "rb"), open(os.devnull, "rb"):
        after = node.free_descriptors()
    if before is None or after is None:
        assert (before, after) == (None, None)
    else:
        assert before - after == 2


def test_namespaces_bound_the_sessions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hardened sysctl that leaves a few namespaces leaves a few sessions; each needs two user namespaces."""
    found = {"/proc/sys/user/max_user_namespaces": 328, "/proc/sys/user/max_net_namespaces": 428}
    monkeypatch.setattr(node, "_number", found.get)
    bounds = node.session_bounds(1000, descriptors=1 << 20)
    assert (bounds["user.max_user_namespaces"], bounds["user.max_net_namespaces"]) == (100, 300)
