"""Decisions about sessions and leftovers, at the start and every minute after it."""

from __future__ import annotations

import uuid
from collections.abc import Container, Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsinit.wire.protocol import TOLD_ONLY, Found, Identity
from sandkasten.actors.node.reconcile import (
    HOST_REBOOT,
    MAX_OUTPUT_FILES,
    SESSION,
    SPOOL_FILE,
    TRASH,
    Decision,
    Leftover,
    Observed,
    Reconciliation,
    SessionAction,
    Sightings,
    plan_reconciliation,
)
from sandkasten.model import EndReason, Status
from sandkasten.model.lifecycle import ENDED, LIVE, Trigger
from sandkasten.output.disk import OutputFile
from sandkasten.store.sessions import KernelIdentity, SessionRecord
from tests.strategies import make_record

ID = "a" * 24
BOOT, EARLIER = (str(uuid.UUID(int=number)) for number in (2, 1))
KERNEL = KernelIdentity(pid=10, start_ticks=20, pid_ns=30, boot_id=BOOT)


def running(session_id: str = ID, pid: int = 10, start_ticks: int = 20, pid_ns: int = 30) -> Found:
    return Found(session_id, Identity(pid, start_ticks, pid_ns, 524288), has_cgroup=True, has_files=True)


def remains(session_id: str = ID) -> Found:
    return Found(session_id, None, has_cgroup=True, has_files=True)


def at_start(records: Sequence[SessionRecord], found: Sequence[Found]) -> Sequence[Decision]:
    """Plan as a start does, when nothing is anybody's yet."""
    return plan_reconciliation(Observed(records, found, BOOT, is_start=True)).decisions


def later(
    records: Sequence[SessionRecord] = (),
    found: Sequence[Found] = (),
    leftovers: Sequence[Leftover] = (),
    *,
    owned: Container[str] = frozenset(),
    seen: Sightings = frozenset(),
    output_files: Sequence[OutputFile] = (),
) -> Reconciliation:
    """Plan as every minute does."""
    return plan_reconciliation(Observed(records, found, BOOT, leftovers, owned, seen, output_files=output_files))


# The start --------------------------------------------------------------------------------------------------------


def test_what_runs_as_recorded_is_adopted() -> None:
    """Live sandboxes survive their daemon."""
    (decision,) = at_start([make_record(ID, identity=KERNEL)], [running()])
    assert decision.action is SessionAction.ADOPT


@pytest.mark.parametrize("found", [running(pid=11), running(start_ticks=21), running(pid_ns=31)])
def test_another_process_under_the_same_id_is_not_adopted(found: Found) -> None:
    """Pid, start time and namespace must all agree."""
    (decision,) = at_start([make_record(ID, identity=KERNEL)], [found])
    assert (decision.action, decision.event) == (SessionAction.FINISH, Trigger.NOT_FOUND)


def test_nothing_of_another_boot_is_adopted() -> None:
    """Pid, start time and namespace may all agree by chance: after a restart of the machine it is somebody else."""
    record = make_record(ID, identity=attrs.evolve(KERNEL, boot_id=EARLIER))
    (decision,) = at_start([record], [running()])
    assert (decision.action, decision.event, decision.reason) == (SessionAction.FINISH, Trigger.NOT_FOUND, HOST_REBOOT)
    assert decision.end_reason is EndReason.HOST_REBOOT


@pytest.mark.parametrize("found", [[], [remains()]])
def test_what_is_gone_is_finished_as_lost(found: list[Found]) -> None:
    """The kernel is the truth: files or an empty cgroup are no sandbox."""
    (decision,) = at_start([make_record(ID, identity=KERNEL)], found)
    assert (decision.action, decision.event) == (SessionAction.FINISH, Trigger.NOT_FOUND)


def test_a_half_built_session_is_undone_even_when_it_runs() -> None:
    """Nobody was ever told of it."""
    (decision,) = at_start([make_record(ID, status=Status.CREATING)], [running()])
    assert (decision.action, decision.event) == (SessionAction.FINISH, Trigger.BUILD_FAILED)


def test_a_begun_end_is_finished_with_its_own_cause() -> None:
    """An expiry that a crash interrupted still ends as `expired`."""
    record = make_record(ID, status=Status.DESTROYING, ending=Trigger.EXPIRE, identity=KERNEL)
    (decision,) = at_start([record], [running()])
    assert (decision.action, decision.event) == (SessionAction.FINISH, Trigger.EXPIRE)


def test_remains_that_the_store_does_not_know_go_at_the_start() -> None:
    """A blank pool sandbox of the last daemon, a build that was cut short: nobody can be making it now."""
    assert [each.action for each in at_start([], [remains()])] == [SessionAction.CLEAN]


def test_a_sandbox_that_runs_unknown_is_told_of_before_it_is_ended() -> None:
    """A database may have been lost: there is a minute to notice."""
    first = plan_reconciliation(Observed([], [running()], BOOT, is_start=True))
    assert [each.action for each in first.decisions] == [SessionAction.WATCH]
    assert first.news == [Leftover(SESSION, ID)]
    second = later([], [running()], seen=first.seen)
    assert [each.action for each in second.decisions] == [SessionAction.CLEAN]
    assert (second.news, second.seen) == ([], frozenset())


# Every minute -----------------------------------------------------------------------------------------------------


def test_what_somebody_works_on_is_left_alone() -> None:
    """An owned session is left alone, whatever its record says and whatever runs."""
    for status in LIVE:
        plan = later([make_record(ID, status=status)], [running()], owned={ID}, seen=frozenset({ID}))
        assert [each.action for each in plan.decisions] == [SessionAction.LEAVE]
    assert [each.action for each in later([], [running()], owned={ID}).decisions] == [SessionAction.LEAVE]


@pytest.mark.parametrize(
    ("record", "found", "second"),
    [
        (make_record(ID, identity=KERNEL), [running()], SessionAction.ADOPT),
        (make_record(ID, identity=KERNEL), [], SessionAction.FINISH),
        (make_record(ID, status=Status.PAUSED, identity=KERNEL), [running()], SessionAction.ADOPT),
        (make_record(ID, status=Status.CREATING), [remains()], SessionAction.FINISH),
        (None, [running()], SessionAction.CLEAN),
        (None, [remains()], SessionAction.CLEAN),
    ],
)
def test_what_nobody_works_on_is_acted_on_when_it_was_seen_twice(
    record: SessionRecord | None, found: list[Found], second: SessionAction
) -> None:
    """Between the looks at store and kernel a session may have begun or ended."""
    records = [] if record is None else [record]
    first = later(records, found)
    assert [each.action for each in first.decisions] == [SessionAction.WATCH]
    assert [each.action for each in later(records, found, seen=first.seen).decisions] == [second]


def test_a_begun_end_waits_for_no_second_look() -> None:
    """The end of a session in state `destroying` was decided before."""
    record = make_record(ID, status=Status.DESTROYING, ending=Trigger.EXPIRE)
    assert [each.action for each in later([record], []).decisions] == [SessionAction.FINISH]


def test_a_leftover_is_told_of_once_and_removed_when_it_is_seen_again() -> None:
    """A leftover that is gone at the second look is not removed."""
    stays, goes = Leftover("cgroup", "stays"), Leftover("loop", "goes")
    first = later(leftovers=[stays, goes])
    assert (first.news, first.remove) == ([stays, goes], [])
    second = later(leftovers=[stays], seen=first.seen)
    assert (second.news, second.remove, second.seen) == ([], [stays], frozenset())


@pytest.mark.parametrize("kind", ["mount", "other_cgroup"])
def test_mounts_by_hand_and_cgroups_elsewhere_are_told_of_once_and_never_removed(kind: str) -> None:
    """A person may need them."""
    mount = Leftover(kind, "/data/sessions")
    seen: Sightings = frozenset()
    news: list[Leftover] = []
    for _ in range(3):
        plan = later(leftovers=[mount], seen=seen)
        assert plan.remove == []
        seen, news = plan.seen, [*news, *plan.news]
    assert news == [mount]


def test_trash_is_no_news_before_it_stays() -> None:
    """Trash is on its way out."""
    trash = Leftover(TRASH, "x")
    first = later(leftovers=[trash])
    assert (first.news, first.remove) == ([], [])
    assert later(leftovers=[trash], seen=first.seen).remove == [trash]


# Files in `spool/` -----------------------------------------------------------------------------------------------

FILE, OTHER = OutputFile(f"{ID}.00000001.runs", ID), OutputFile("0000000000000001.spool")
FILES = [Leftover(SPOOL_FILE, each.name) for each in (FILE, OTHER)]


def test_unknown_output_files_are_told_of_and_removed_at_the_start() -> None:
    """Nobody can be writing them."""
    plan = plan_reconciliation(Observed([], [], BOOT, is_start=True, output_files=[FILE, OTHER]))
    assert (plan.news, plan.remove, plan.seen) == (FILES, FILES, frozenset())


def test_later_they_are_removed_when_they_were_seen_twice() -> None:
    """Each is told of once."""
    first = later(output_files=[FILE, OTHER])
    assert (first.news, first.remove) == (FILES, [])
    second = later(output_files=[FILE], seen=first.seen)
    assert (second.news, second.remove, second.seen) == ([], FILES[:1], frozenset())


@pytest.mark.parametrize("status", sorted(LIVE))
@pytest.mark.parametrize("is_start", [True, False])
def test_files_of_a_session_that_has_a_row_are_kept_in_whatever_state_it_is(status: Status, is_start: bool) -> None:
    """Also while its end is being finished: that removes them itself."""
    record = make_record(ID, status=status, identity=KERNEL)
    seen = frozenset(FILES)
    plan = plan_reconciliation(Observed([record], [running()], BOOT, seen=seen, is_start=is_start, output_files=[FILE]))
    assert (plan.news, plan.remove) == ([], [])


def test_a_run_that_began_after_the_rows_were_read_keeps_its_files() -> None:
    """The files' session has an owner by then, because the owners are asked last."""
    plan = later([], [], owned={ID}, seen=frozenset(FILES), output_files=[FILE])
    assert (plan.news, plan.remove, plan.seen) == ([], [], frozenset())


def test_files_of_a_sandbox_that_runs_unknown_go_with_it_and_not_before() -> None:
    """There is a minute to bring the database back."""
    first = plan_reconciliation(Observed([], [running()], BOOT, is_start=True, output_files=[FILE]))
    assert (set(first.news), first.remove) == ({Leftover(SESSION, ID), FILES[0]}, [])
    second = later([], [running()], seen=first.seen, output_files=[FILE])
    assert ([each.action for each in second.decisions], second.remove) == ([SessionAction.CLEAN], FILES[:1])


def test_however_many_there_are_one_look_is_bounded() -> None:
    """Files beyond the bound are found by the next look."""
    many = [OutputFile(f"{number:016x}.spool") for number in range(MAX_OUTPUT_FILES + 1)]
    plan = plan_reconciliation(Observed([], [], BOOT, is_start=True, output_files=many))
    assert (len(plan.news), len(plan.remove)) == (MAX_OUTPUT_FILES, MAX_OUTPUT_FILES)


# Everything at once -----------------------------------------------------------------------------------------------

IDS = tuple(letter * 24 for letter in "abcdef")
KERNELS = (None, KERNEL, attrs.evolve(KERNEL, boot_id=EARLIER), attrs.evolve(KERNEL, pid=9))
LEFTOVERS = st.builds(Leftover, st.sampled_from(["cgroup", "mount", TRASH, "other_cgroup"]), st.sampled_from("xyz"))


@attrs.define
class World:
    """A machine as the planner may find it, and what carrying out a plan makes of it."""

    records: dict[str, SessionRecord]
    found: dict[str, Found]
    leftovers: set[Leftover]
    owned: set[str]
    output_files: set[OutputFile]
    seen: Sightings = frozenset()

    def plan(self, *, is_start: bool = False) -> Reconciliation:
        records = [each for each in self.records.values() if each.session.status in LIVE]
        found, leftovers, output_files = list(self.found.values()), list(self.leftovers), list(self.output_files)
        return plan_reconciliation(
            Observed(records, found, BOOT, leftovers, self.owned, self.seen, is_start, output_files)
        )

    def carry_out(self, plan: Reconciliation) -> None:
        for decision in plan.decisions:
            match decision.action:
                case SessionAction.ADOPT:
                    self.owned.add(decision.session_id)
                case SessionAction.FINISH:
                    del self.records[decision.session_id]
                    self.found.pop(decision.session_id, None)
                    self.output_files = {each for each in self.output_files if each.session_id != decision.session_id}
                case SessionAction.CLEAN:
                    del self.found[decision.session_id]
        self.leftovers -= set(plan.remove)
        self.output_files = {each for each in self.output_files if Leftover(SPOOL_FILE, each.name) not in plan.remove}
        self.seen = plan.seen


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw any mixture of rows, sandboxes, remains, owners and leftovers."""
    records, found, owned = {}, {}, set()
    for session_id in draw(st.sets(st.sampled_from(IDS))):
        kernel = draw(
            st.sampled_from([None, KERNEL, attrs.evolve(KERNEL, boot_id=EARLIER), attrs.evolve(KERNEL, pid=9)])
        )
        ending = draw(st.sampled_from([None, Trigger.EXPIRE]))
        status = draw(st.sampled_from(sorted(LIVE | ENDED)))
        records[session_id] = make_record(session_id, status=status, identity=kernel, ending=ending)
    for session_id in draw(st.sets(st.sampled_from(IDS))):
        found[session_id] = draw(st.sampled_from([running(session_id), remains(session_id)]))
    owned = draw(st.sets(st.sampled_from(IDS)))
    output_files = {OutputFile(each or "x", each) for each in draw(st.sets(st.sampled_from([*IDS, None])))}
    return World(records, found, draw(st.sets(LEFTOVERS)), owned, output_files)


@given(worlds(), st.booleans())
def test_every_id_gets_exactly_one_action_and_nothing_live_is_cleaned(world: World, is_start: bool) -> None:
    """Owned ids are left alone, and a sandbox that runs as recorded is at worst watched."""
    plan = world.plan(is_start=is_start)
    live = {name for name, each in world.records.items() if each.session.status in LIVE}
    assert sorted(each.session_id for each in plan.decisions) == sorted(live | world.found.keys())
    for each in plan.decisions:
        if each.session_id in world.owned:
            assert each.action is SessionAction.LEAVE
        elif each.session_id in live:
            assert each.action is not SessionAction.CLEAN
            record, found = world.records[each.session_id], world.found.get(each.session_id)
            if record.session.status in (Status.RUNNING, Status.PAUSED) and record.identity == KERNEL and found:
                assert (found.identity is None) or each.action in (SessionAction.ADOPT, SessionAction.WATCH)
        else:
            assert each.action in (SessionAction.CLEAN, SessionAction.WATCH)
    removed = {each.name for each in plan.remove if each.kind == SPOOL_FILE}
    assert not removed & (live | world.owned)


@given(worlds(), st.booleans())
def test_what_was_carried_out_is_not_planned_again(world: World, is_start: bool) -> None:
    """Two looks settle any machine; the third finds sessions with owners, disks of ours, and nothing to do or tell."""
    world.carry_out(world.plan(is_start=is_start))
    world.carry_out(world.plan())
    plan = world.plan()
    assert {each.action for each in plan.decisions} <= {SessionAction.LEAVE}
    assert (plan.remove, plan.news) == ([], [])
    assert {each.kind for each in world.leftovers} <= TOLD_ONLY
    kept = {name for name, each in world.records.items() if each.session.status in LIVE} | world.owned
    assert {each.session_id for each in world.output_files} <= kept
