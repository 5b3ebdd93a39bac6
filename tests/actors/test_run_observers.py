"""Notices to the observers of a run: their content, their order, and the last one."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from sandkasten.actors.runs.run import Run, RunObserver, RunRequest, Shell
from sandkasten.model import Cause, ExecEnd, ExecSpec, Output, Stream, Usage
from sandkasten.output.store import OutputStore, SessionOutput
from tests.waiting import patience

END = ExecEnd("a", 0, None, Cause.EXITED, "/", 1, None, shell_restarted=False, usage=Usage())


class Notes(RunObserver):
    """Notes all calls; holds the run up while there is no room."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.room = trio.Event()

    def admitted(self, run: Run) -> None:
        self.calls.append(f"admitted {run.exec_id}")

    def began(self, run: Run) -> None:
        self.calls.append(f"began {run.exec_id}")

    def changed(self, run: Run) -> None:
        self.calls.append(f"changed {run.exec_id}")

    def wrote(self, run: Run, piece: Output) -> bool:
        self.calls.append(f"wrote {piece.data!r}")
        return True

    async def wait_room(self, run: Run) -> None:
        await self.room.wait()

    def ended(self, run: Run) -> None:
        self.calls.append(f"ended {run.exec_id} {run.end is not None}")


def join(logs: SessionOutput, exec_id: str, *observers: Notes) -> Run:
    run = Run(RunRequest(ExecSpec("true", exec_id=exec_id), timeout_ms=None))
    run.join(
        logs.open(exec_id),
        observers=observers,
        listeners=observers,
        cancel=lambda run, now: None,
        wake=trio.lowlevel.checkpoint,
    )
    return run


async def test_an_observer_sees_a_life_in_order_and_nothing_after_its_end(tmp_path: Path) -> None:
    """Neither a detach nor output that comes too late."""
    notes = Notes()
    notes.room.set()
    run = join(OutputStore(tmp_path).session("s"), "a", notes)
    run.admit(None)
    run.begin(0)
    await run.put(Stream.STDOUT, b"x")
    run.detach()
    run.finish(END)
    run.note_change()
    run.observe(notes)
    run.note_change()
    assert notes.calls == ["admitted a", "began a", "wrote b'x'", "changed a", "ended a True"]


async def test_an_observer_without_room_holds_the_run_up(tmp_path: Path) -> None:
    """The next piece is not taken before there is room; it is in the log by then."""
    notes = Notes()
    run = join(OutputStore(tmp_path).session("s"), "a", notes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.put, Stream.STDOUT, b"x")
        await trio.testing.wait_all_tasks_blocked()
        assert run.log is not None
        assert (len(nursery.child_tasks), run.log.stdout_bytes) == (1, 1)
        notes.room.set()


async def test_an_observer_of_a_shell_sees_its_runs_from_then_on(tmp_path: Path) -> None:
    """One that waits already, and one that comes later; none once the observer has left."""
    notes, logs, shell = Notes(), OutputStore(tmp_path).session("s"), Shell("main")
    waiting, later = join(logs, "a"), join(logs, "b")
    waiting.admit(shell)
    shell.observe(notes)
    later.admit(shell)
    waiting.begin(0)
    waiting.finish(END)
    shell.remove(waiting)
    shell.unobserve(notes)
    later.begin(0)
    assert notes.calls == ["admitted b", "began a", "ended a True"]


class Faulty(Notes):
    """Fails when the run ends."""

    def ended(self, run: Run) -> None:
        raise RuntimeError("an observer's fault")


async def test_a_waiter_has_its_answer_when_an_observer_fails(tmp_path: Path) -> None:
    """The fault is the actor's to die of; nobody waits for ever."""
    run = join(OutputStore(tmp_path).session("s"), "a", Faulty())
    with pytest.raises(RuntimeError, match="an observer's fault"):
        run.finish(END)
    with trio.fail_after(patience(1)):
        assert await run.ended.wait() == END


async def test_every_observer_hears_of_output_before_one_holds_the_run_up(tmp_path: Path) -> None:
    """A slow disk is no reason to show a viewer less."""
    slow, viewer = Notes(), Notes()
    viewer.room.set()
    run = join(OutputStore(tmp_path).session("s"), "a", slow, viewer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.put, Stream.STDOUT, b"x")
        await trio.testing.wait_all_tasks_blocked()
        assert slow.calls[-1] == viewer.calls[-1] == "wrote b'x'"
        slow.room.set()
