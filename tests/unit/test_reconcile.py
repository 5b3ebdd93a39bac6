"""What is decided about each session after a restart."""

from __future__ import annotations

import uuid

import attrs
import pytest

from nsinit.protocol import Found, Identity
from sandkasten.lifecycle import Event
from sandkasten.model import EndReason, Status
from sandkasten.reconcile import HOST_REBOOT, Action, plan_reconciliation
from sandkasten.store.sessions import KernelIdentity
from tests.strategies import make_record

ID = "a" * 24
BOOT, EARLIER = (str(uuid.UUID(int=number)) for number in (2, 1))
KERNEL = KernelIdentity(pid=10, start_ticks=20, pid_ns=30, boot_id=BOOT)


def _found(pid: int = 10, start_ticks: int = 20, pid_ns: int = 30) -> Found:
    return Found(ID, Identity(pid, start_ticks, pid_ns, 524288), has_cgroup=True, has_files=True)


def test_what_runs_as_recorded_is_adopted() -> None:
    """Live sandboxes survive their daemon."""
    record = make_record(ID, identity=KERNEL)
    assert [each.action for each in plan_reconciliation([record], [_found()], boot_id=BOOT)] == [Action.ADOPT]


@pytest.mark.parametrize("found", [_found(pid=11), _found(start_ticks=21), _found(pid_ns=31)])
def test_another_process_under_the_same_id_is_not_adopted(found: Found) -> None:
    """Pid, start time and namespace must all agree."""
    (decision,) = plan_reconciliation([make_record(ID, identity=KERNEL)], [found], boot_id=BOOT)
    assert (decision.action, decision.event) == (Action.FINISH, Event.NOT_FOUND)


def test_nothing_of_another_boot_is_adopted() -> None:
    """Pid, start time and namespace may all agree by chance: after a restart of the machine it is somebody else."""
    record = make_record(ID, identity=attrs.evolve(KERNEL, boot_id=EARLIER))
    (decision,) = plan_reconciliation([record], [_found()], boot_id=BOOT)
    assert (decision.action, decision.event, decision.reason) == (Action.FINISH, Event.NOT_FOUND, HOST_REBOOT)
    assert decision.end_reason is EndReason.HOST_REBOOT


def test_a_record_of_a_version_that_knew_no_boot_is_judged_by_the_rest() -> None:
    """An upgrade loses no session."""
    record = make_record(ID, identity=attrs.evolve(KERNEL, boot_id=None))
    assert [each.action for each in plan_reconciliation([record], [_found()], boot_id=BOOT)] == [Action.ADOPT]


@pytest.mark.parametrize("found", [[], [Found(ID, None, has_cgroup=True, has_files=True)]])
def test_what_is_gone_is_finished_as_lost(found: list[Found]) -> None:
    """The kernel is the truth: files or an empty cgroup are no sandbox."""
    (decision,) = plan_reconciliation([make_record(ID, identity=KERNEL)], found, boot_id=BOOT)
    assert (decision.action, decision.event) == (Action.FINISH, Event.NOT_FOUND)


def test_a_half_built_session_is_undone_even_when_it_runs() -> None:
    """Nobody was ever told of it."""
    (decision,) = plan_reconciliation([make_record(ID, status=Status.CREATING)], [_found()], boot_id=BOOT)
    assert (decision.action, decision.event) == (Action.FINISH, Event.BUILD_FAILED)


def test_a_begun_end_is_finished_with_its_own_cause() -> None:
    """An expiry that a crash interrupted still ends as `expired`."""
    record = make_record(ID, status=Status.DESTROYING, ending=Event.EXPIRE, identity=KERNEL)
    (decision,) = plan_reconciliation([record], [_found()], boot_id=BOOT)
    assert (decision.action, decision.event) == (Action.FINISH, Event.EXPIRE)


def test_what_the_store_does_not_know_is_reaped() -> None:
    """Nothing leaks, not even what a lost database forgot."""
    assert [each.action for each in plan_reconciliation([], [_found()], boot_id=BOOT)] == [Action.REAP]
