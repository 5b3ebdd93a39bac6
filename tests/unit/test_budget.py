"""The budget: what fits is counted, what does not is refused with the figures, and what runs is never refused."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sandkasten.admission.budget import FIRST_MB, FIXES, IDLE_MB, IDLE_PIDS, Budget, MachineResources, find_room
from sandkasten.config import MIB, AdmissionSettings, Config, ServerSettings
from sandkasten.counters import node as counters
from sandkasten.errors import Capacity, InvalidRequest
from sandkasten.model import Limits
from sandkasten.model.node import Amounts

GIB = 1024 * MIB
NO_RESERVE: dict[str, Any] = {"reserve_percent": 0.0, "reserve_memory_mb": 0}


class Node:
    """A node of 1 GiB with two cores, and as much free as a test says."""

    def __init__(self) -> None:
        self.left = Amounts(memory_bytes=GIB, pids=1000)
        self.end: datetime | None = None
        self.descriptors: int | None = None

    def totals(self) -> Amounts:
        return Amounts(cpu=2.0, memory_bytes=GIB, pids=1000, disk_bytes=10 * GIB)

    def free(self) -> Amounts:
        return self.left

    def free_descriptors(self) -> int | None:
        return self.descriptors

    def next_end(self) -> datetime | None:
        return self.end


def budget_of(node: Node, max_sessions: int = 100, **settings: Any) -> Budget:  # settings: fields of AdmissionSettings
    return Budget(AdmissionSettings(**{**NO_RESERVE, **settings}), max_sessions, node)


def refusal(budget: Budget, limits: Limits, **arguments: Any) -> Capacity:
    with pytest.raises(Capacity) as caught:
        budget.admit("refused", limits, **arguments)
    return caught.value


@pytest.mark.parametrize(
    ("setting", "limits", "resource", "requested", "committed", "total"),
    [
        ("memory_overcommit", Limits(memory_mb=1024), "memory_bytes", GIB, 2 * GIB, int(2.5 * GIB)),
        ("pids_overcommit", Limits(pids=1000), "pids", 1000, 2000, 2500),
        ("cpu_overcommit", Limits(cpu=2.0), "cpu", 2.0, 4.0, 5.0),
        ("disk_overcommit", Limits(disk_mb=10240), "disk_bytes", 10 * GIB, 20 * GIB, 25 * GIB),
    ],
)
def test_limits_together_never_exceed_what_there_is_times_the_ratio(
    setting: str, limits: Limits, resource: str, requested: float, committed: float, total: float
) -> None:
    """The refusal names the resource and its figures; it may be repeated, and succeeds once something ended."""
    others: dict[str, Any] = dict.fromkeys(
        ("memory_overcommit", "pids_overcommit", "cpu_overcommit", "disk_overcommit"), 0.0
    )
    budget = budget_of(Node(), **{**others, setting: 2.5})
    for name in ("a", "b"):
        budget.admit(name, limits)
    error = refusal(budget, limits)
    assert error.retryable
    assert error.details == {
        "resource": resource,
        "requested": requested,
        "committed": committed,
        "total": total,
        "bound": f"admission.{setting}",
        "fix": FIXES[f"admission.{setting}"],
    }
    budget.release("a")
    budget.admit("c", limits)


def test_a_session_that_would_not_fit_alone_is_the_callers_mistake() -> None:
    """To repeat it would never help, so it is no 503."""
    budget = budget_of(Node(), memory_overcommit=2.0)
    with pytest.raises(InvalidRequest) as caught:
        budget.admit("a", Limits(memory_mb=2049))
    assert caught.value.details == {"limits": "memory_mb can be at most 2048"}


def test_slots_are_counted() -> None:
    """One more than there may be is refused, whatever its limits."""
    budget = budget_of(Node(), max_sessions=1)
    budget.admit("a", Limits())
    error = refusal(budget, Limits())
    assert (error.details["resource"], error.details["total"], error.details["max_sessions"]) == ("sessions", 1, 1)
    assert (error.details["bound"], error.details["fix"]) == ("server.max_sessions", "raise server.max_sessions")


def test_too_little_free_memory_refuses_whatever_was_promised() -> None:
    """A machine short of memory gets no more work, whichever program uses the memory. Creates under way count, though
    their memory is not used yet.
    """
    node = Node()
    budget = budget_of(node, reserve_percent=0.0, reserve_memory_mb=100)
    node.left = Amounts(memory_bytes=(100 + 2 * FIRST_MB) * MIB)
    budget.admit("a", Limits(), under_way=1)
    error = refusal(budget, Limits(), under_way=2)
    assert error.details == {
        "resource": "memory_bytes",
        "free": node.left.memory_bytes,
        "reserve": 100 * MIB,
        "bound": "memory",
        "fix": FIXES["memory"],
    }


def test_too_few_free_process_ids_refuse() -> None:
    """The rest of the machine needs some."""
    node = Node()
    budget = budget_of(node, reserve_percent=5.0)
    node.left = Amounts(memory_bytes=GIB, pids=49)
    error = refusal(budget, Limits())
    assert error.details == {
        "resource": "pids",
        "free": 49,
        "reserve": 50,
        "bound": "kernel.pid_max",
        "fix": FIXES["kernel.pid_max"],
    }


def test_the_reserve_never_takes_more_than_half_of_a_small_node() -> None:
    """A default made for larger machines does not make a small one useless."""
    node = Node()
    budget = budget_of(node, reserve_memory_mb=4096)
    node.left = Amounts(memory_bytes=600 * MIB)
    budget.admit("a", Limits())


def test_what_the_kernel_does_not_tell_is_not_counted() -> None:
    """Unknown is not zero."""

    class Blind(Node):
        def totals(self) -> Amounts:
            return Amounts()

    node = Blind()
    node.left = Amounts()
    budget = budget_of(node, reserve_percent=50.0)
    for number in range(50):
        budget.admit(number, Limits(memory_mb=2**20))


def test_what_runs_is_counted_and_never_refused() -> None:
    """Adopted sessions may be more than fit; then nothing new is admitted, and nothing of theirs may grow."""
    budget = budget_of(Node(), memory_overcommit=1.0)
    for name in "abc":
        budget.hold(name, Limits(memory_mb=512))
    assert budget.committed.memory_bytes == 3 * 512 * MIB
    refusal(budget, Limits(memory_mb=16))
    with pytest.raises(Capacity):
        budget.change("a", Limits(memory_mb=513))
    budget.change("a", Limits(memory_mb=256))
    assert budget.committed.memory_bytes == (2 * 512 + 256) * MIB


def test_the_end_of_others_is_judged_before_they_end() -> None:
    """Limits tell whether enough is released; how much free memory comes back shows only afterwards."""
    node = Node()
    budget = budget_of(node, memory_overcommit=1.0, reserve_percent=10.0)
    for name in "abcd":
        budget.hold(name, Limits(memory_mb=256))
    refused = refusal(budget, Limits(memory_mb=512))
    assert not budget.would_fit(refused, ["a"])
    assert budget.would_fit(refused, ["a", "b"])
    assert not budget.would_fit(refused, ["a", "gone"])
    budget.release("a")
    node.left = Amounts(memory_bytes=0, pids=1000)
    assert budget.would_fit(refusal(budget, Limits(memory_mb=16)), ["b"])


def test_a_change_takes_only_what_it_adds() -> None:
    """Growing by what is left fits; one more does not, and then the old limits are still counted."""
    budget = budget_of(Node(), memory_overcommit=1.0)
    budget.admit("a", Limits(memory_mb=512))
    budget.admit("b", Limits(memory_mb=256))
    budget.change("b", Limits(memory_mb=512))
    with pytest.raises(Capacity) as caught:
        budget.change("b", Limits(memory_mb=513))
    assert caught.value.details["requested"] == MIB
    assert budget.committed.memory_bytes == GIB


def test_what_is_counted_is_the_sum_over_those_that_live() -> None:
    """The sum is that of the live sessions, in whatever order sessions came and went."""
    budget = budget_of(Node())
    for number in range(20):
        budget.admit(number, Limits(cpu=0.1, memory_mb=16 + number, pids=8))
    for number in range(0, 20, 2):
        budget.release(number)
        budget.release(number)
    budget.change(1, Limits(cpu=0.3, memory_mb=64))
    expected = 64 + sum(16 + number for number in range(3, 20, 2))
    assert budget.committed.memory_bytes == expected * MIB
    assert (budget.committed.sessions, budget.committed.cpu) == (10, 1.2)


def test_a_daemon_that_is_almost_out_of_descriptors_admits_nobody() -> None:
    """Connections of clients, ways out and previews count; sessions under way have not taken theirs yet."""
    node = Node()
    budget = budget_of(node)
    node.descriptors = 64 + 2 * counters.FIRST_FDS
    budget.admit("a", Limits(), under_way=1)
    error = refusal(budget, Limits(), under_way=2)
    assert (error.retryable, error.details["resource"]) == (True, "descriptors")
    assert error.details["fix"] == FIXES["RLIMIT_NOFILE"]
    node.descriptors -= 1
    budget.admit("b", Limits())
    refusal(budget, Limits(), under_way=1)


@pytest.mark.parametrize(("ends_in_s", "advice"), [(None, 1), (-5.0, 1), (9.5, 10), (1000.0, 30)])
def test_retry_after_is_when_the_next_lease_ends(ends_in_s: float | None, advice: int) -> None:
    """As far as that is soon: sessions may well be ended before."""
    node = Node()
    budget = budget_of(node, max_sessions=0)
    node.end = None if ends_in_s is None else datetime.now(UTC) + timedelta(seconds=ends_in_s)
    assert refusal(budget, Limits()).retry_after_s == advice


def test_a_storm_of_refused_creates_looks_at_all_sessions_once_a_second(tmp_path: Path) -> None:
    """Each refusal says when to come back, as if it had looked itself."""
    looks = []

    def next_end() -> datetime:
        looks.append(1)
        return datetime.now(UTC) + timedelta(seconds=20)

    budget = Budget(AdmissionSettings(), 0, MachineResources(tmp_path, {}, next_end))
    began_s = time.monotonic()
    advice = {refusal(budget, Limits()).retry_after_s for _ in range(100)}
    assert advice <= {18, 19, 20}
    assert len(looks) <= 1 + (time.monotonic() - began_s)


def roomy(monkeypatch: pytest.MonkeyPatch, **bounds: int) -> None:
    """Let every fixed limit allow a thousand sessions, or as many as said."""
    fixed = {"server.max_sessions": 1000, "RLIMIT_NOFILE": 5000} | bounds
    monkeypatch.setattr(counters, "session_bounds", lambda wanted, **_: fixed | {"server.max_sessions": wanted})


@pytest.mark.parametrize(
    ("memory_mb", "pids", "sessions", "bound"),
    [
        (24 * 1024, 29_491, 1000, "server.max_sessions"),
        (4 * 1024, 29_491, 4096 * 0.95 // IDLE_MB, "memory"),
        (1024, 29_491, (1024 - 128) // IDLE_MB, "memory"),
        (24 * 1024, 1600, 1600 * 0.95 // IDLE_PIDS, "kernel.pid_max"),
    ],
)
def test_default_sessions_are_admitted_as_far_as_they_fit_while_they_rest(
    monkeypatch: pytest.MonkeyPatch, memory_mb: int, pids: int, sessions: float, bound: str
) -> None:
    """Without a ratio the sum of the limits never refuses before the memory does; the refusal names the resource."""
    roomy(monkeypatch)
    config = Config(admission=AdmissionSettings(reserve_percent=5.0))
    totals = Amounts(cpu=2.0, memory_bytes=memory_mb * MIB, pids=pids)
    room = find_room(config, totals)
    assert (room.sessions, room.bound, room.fix) == (sessions, bound, FIXES[bound])

    class Machine(Node):
        def totals(self) -> Amounts:
            return totals

    node = Machine()
    node.left = Amounts(memory_bytes=totals.memory_bytes, pids=pids)
    budget = Budget(config.admission, 1000, node)
    for number in range(room.sessions):
        budget.admit(number, Limits())
    error = refusal(budget, Limits())
    assert (error.details["bound"], error.details["fix"]) == (bound, FIXES[bound])


def test_a_ratio_that_is_set_holds_whatever_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose sessions must always have their promised memory admits as many as fit."""
    roomy(monkeypatch)
    config = Config(admission=AdmissionSettings(memory_overcommit=1.0), server=ServerSettings(max_sessions=50))
    room = find_room(config, Amounts(memory_bytes=16 * GIB, pids=29_491))
    assert (room.sessions, room.bound) == (16 * 1024 // Limits().memory_mb, "admission.memory_overcommit")


@pytest.mark.parametrize("bound", ["RLIMIT_NOFILE", "kernel.pty.max", "user.max_user_namespaces"])
def test_a_fixed_limit_of_the_machine_is_named(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """A limit that allows fewer sessions than the setting bounds them, and has a fix of its own."""
    roomy(monkeypatch, **{bound: 7})
    room = find_room(Config(), Amounts(memory_bytes=16 * GIB, pids=29_491))
    assert (room.sessions, room.bound) == (7, bound)
    assert room.fix
