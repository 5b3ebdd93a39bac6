"""States of a run, the events that change them, and the action of each change. No I/O, no clock, no process.

Two tables, `COMMAND` for a command of a shell and `PROGRAM` for a program of its own, map (state, event) to
(next state, action). The owner of a run gives the event to its `Lifecycle` and performs the action that it returns.
Every pair is either in a table or in the set beside the table, whose pairs cannot happen. One that happens anyway
raises `ImpossibleEvent`, which costs the connection or the command that the event came from, and never the loop.

A command, from its request to its answer:

    QUEUED -> RUNNING -> ENDED -> DRAINING -> OVER

`FORCED` and `CLEARING` come between `RUNNING` and `ENDED` when somebody ends the command before its time. The kill
ladder climbs in both; it needs the end of the shell's part and of the processes, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from runner.wire.protocol import Cause

EXIT_TIMED_OUT = 124
EXIT_CANCELLED = 130


class State(Enum):
    """Where a run is between its request and its answer."""

    QUEUED = "queued"
    """Accepted, and not begun."""
    RUNNING = "running"
    """The shell was handed the command (and may not have read it yet); the program's process was started."""
    TAKEN_BACK = "taken back"
    """The shell never began the command and is being replaced; the next one gets the command."""
    FORCED = "forced"
    """The kill ladder climbs, and the shell or the program's own process is still there."""
    CLEARING = "clearing"
    """The kill ladder climbs for processes that the run has started: the shell or the program's own process is done."""
    REAPING = "reaping"
    """No process of a program was found by the kill ladder; its wait status has not come yet."""
    ENDED = "ended"
    """The command has ended; the answer needs a shell that waits, for it names that shell's directory."""
    DRAINING = "draining"
    """The result is known, and output is still on its way to the client."""
    OVER = "over"
    """The run was answered."""

    __hash__ = object.__hash__  # members are compared by identity; the hash of `Enum` is a call of Python code


class Notice(Enum):
    """News of a run. The first words of each docstring name the source of the news."""

    BEGIN = "begin"
    """Queue of the shell, or `Programs`: it is this run's turn."""
    UNSTARTED = "unstarted"
    """Shell: the command was not begun, and is not going to be."""
    DONE = "done"
    """Shell: the command's status came, or the shell died under the command. Reaper: the program's process died."""
    FORCE = "force"
    """Client, connection or clock: cancel, hang-up, time limit."""
    CLEAR = "clear"
    """Kill ladder: nothing of the run is left."""
    READY = "ready"
    """Shell: one waits for a command, or there will never be one again."""
    CLOSED = "closed"
    """Shell: closed on request, nothing of it is left."""
    DRAINED = "drained"
    """Streams: the last output was read."""
    FAIL = "fail"
    """Queue, shell, loop: the command cannot be run, or was lost by an error of PID 1's."""

    __hash__ = object.__hash__


class Action(Enum):
    """A step to be done by the owner of the `Lifecycle`."""

    NOTHING = "nothing"
    START = "start"
    """Hand the command to the shell and tell the client; start the clock of the time limit."""
    START_AGAIN = "start again"
    """Hand the command to a second shell."""
    TAKE_BACK = "take back"
    """Remove the files that the command's shell was to open."""
    FORCE = "force"
    """Begin to climb the kill ladder. A shell that has not begun the command yet is to find nothing to run."""
    HURRY = "hurry"
    """Kill at once, if the client says so now and did not before."""
    CLIMB = "climb"
    """Tell the kill ladder that the shell is done with the command."""
    END = "end"
    """Stop the clocks, refuse more input, collect the last output."""
    CONCLUDE = "conclude"
    """Let the shell take its next command; answer when the output is read."""
    ANSWER = "answer"
    """Give up the streams and send the result."""
    FAIL = "fail"
    """Give up everything and send the error."""

    __hash__ = object.__hash__


Table = Mapping[tuple[State, Notice], tuple[State, Action]]
Pairs = frozenset[tuple[State, Notice]]


class ImpossibleEvent(Exception):
    """An event came in a state in which it cannot happen: an error of PID 1's own."""


def _pairs(*rows: tuple[State, tuple[Notice, ...]]) -> Pairs:
    return frozenset((state, event) for state, events in rows for event in events)


COMMAND: Table = {
    # In the queue. Whatever ends it there ends it at once: it never ran, and no shell has to be asked.
    (State.QUEUED, Notice.BEGIN): (State.RUNNING, Action.START),
    (State.QUEUED, Notice.FORCE): (State.DRAINING, Action.CONCLUDE),
    (State.QUEUED, Notice.CLOSED): (State.ENDED, Action.NOTHING),
    (State.QUEUED, Notice.FAIL): (State.OVER, Action.FAIL),
    # With the shell.
    (State.RUNNING, Notice.UNSTARTED): (State.TAKEN_BACK, Action.TAKE_BACK),
    (State.RUNNING, Notice.DONE): (State.ENDED, Action.END),
    (State.RUNNING, Notice.FORCE): (State.FORCED, Action.FORCE),
    (State.RUNNING, Notice.CLOSED): (State.ENDED, Action.END),
    (State.RUNNING, Notice.FAIL): (State.OVER, Action.FAIL),
    # Between two shells. The first may have begun it in the instant in which it was given up: its status counts.
    (State.TAKEN_BACK, Notice.BEGIN): (State.RUNNING, Action.START_AGAIN),
    (State.TAKEN_BACK, Notice.DONE): (State.ENDED, Action.END),
    (State.TAKEN_BACK, Notice.FORCE): (State.ENDED, Action.END),
    (State.TAKEN_BACK, Notice.CLOSED): (State.ENDED, Action.END),
    (State.TAKEN_BACK, Notice.FAIL): (State.OVER, Action.FAIL),
    # Ended by force. One the shell turns out never to have begun is not tried again.
    (State.FORCED, Notice.UNSTARTED): (State.ENDED, Action.END),
    (State.FORCED, Notice.DONE): (State.CLEARING, Action.CLIMB),
    (State.FORCED, Notice.FORCE): (State.FORCED, Action.HURRY),
    (State.FORCED, Notice.CLOSED): (State.ENDED, Action.END),
    (State.FORCED, Notice.FAIL): (State.OVER, Action.FAIL),
    (State.CLEARING, Notice.DONE): (State.CLEARING, Action.NOTHING),  # the shell reported, and died afterwards
    (State.CLEARING, Notice.FORCE): (State.CLEARING, Action.HURRY),
    (State.CLEARING, Notice.CLEAR): (State.ENDED, Action.END),
    (State.CLEARING, Notice.READY): (State.CLEARING, Action.NOTHING),  # the shell died; its successor is there first
    (State.CLEARING, Notice.CLOSED): (State.ENDED, Action.END),
    (State.CLEARING, Notice.FAIL): (State.OVER, Action.FAIL),
    # Ended. Its shell may have died of it, even after it reported.
    (State.ENDED, Notice.DONE): (State.ENDED, Action.NOTHING),
    (State.ENDED, Notice.FORCE): (State.ENDED, Action.NOTHING),
    (State.ENDED, Notice.READY): (State.DRAINING, Action.CONCLUDE),
    (State.ENDED, Notice.CLOSED): (State.ENDED, Action.NOTHING),
    (State.ENDED, Notice.DRAINED): (State.ENDED, Action.NOTHING),  # asked for again by CONCLUDE
    (State.ENDED, Notice.FAIL): (State.OVER, Action.FAIL),
    # The shell has its next command. A client that reads slowly holds up its own answer only.
    (State.DRAINING, Notice.FORCE): (State.DRAINING, Action.NOTHING),
    (State.DRAINING, Notice.DRAINED): (State.OVER, Action.ANSWER),
    (State.DRAINING, Notice.FAIL): (State.OVER, Action.FAIL),
    (State.OVER, Notice.FORCE): (State.OVER, Action.NOTHING),
    (State.OVER, Notice.FAIL): (State.OVER, Action.NOTHING),  # what failed is the answer itself
}

_SHELL_NEWS = (Notice.UNSTARTED, Notice.DONE, Notice.CLEAR, Notice.READY, Notice.CLOSED)

COMMAND_IMPOSSIBLE: Pairs = _pairs(
    # No shell has it.
    (State.QUEUED, (Notice.UNSTARTED, Notice.DONE, Notice.CLEAR, Notice.READY, Notice.DRAINED)),
    # The shell is this command's, so none waits; a shell that dies is `DONE` first. No ladder climbs. Output counts as
    # drained when the end of the command is known (`END`), and not before.
    (State.RUNNING, (Notice.BEGIN, Notice.CLEAR, Notice.READY, Notice.DRAINED)),
    # The next shell that waits begins it (`BEGIN`). The streams are closed.
    (State.TAKEN_BACK, (Notice.UNSTARTED, Notice.CLEAR, Notice.READY, Notice.DRAINED)),
    # The ladder goes on while the shell is busy with the command.
    (State.FORCED, (Notice.BEGIN, Notice.CLEAR, Notice.READY, Notice.DRAINED)),
    (State.CLEARING, (Notice.BEGIN, Notice.UNSTARTED, Notice.DRAINED)),
    # Clocks and ladder are stopped.
    (State.ENDED, (Notice.BEGIN, Notice.UNSTARTED, Notice.CLEAR)),
    # The queue has forgotten it, and then the streams are closed.
    (State.DRAINING, (Notice.BEGIN, *_SHELL_NEWS)),
    (State.OVER, (Notice.BEGIN, Notice.DRAINED, *_SHELL_NEWS)),
)

PROGRAM: Table = {
    (State.QUEUED, Notice.BEGIN): (State.RUNNING, Action.START),
    (State.RUNNING, Notice.DONE): (State.DRAINING, Action.END),
    (State.RUNNING, Notice.FORCE): (State.FORCED, Action.FORCE),
    # Ended by force: the answer needs the program's wait status and an empty set of processes, in either order.
    (State.FORCED, Notice.DONE): (State.CLEARING, Action.NOTHING),
    (State.FORCED, Notice.FORCE): (State.FORCED, Action.HURRY),
    (State.FORCED, Notice.CLEAR): (State.REAPING, Action.NOTHING),
    (State.CLEARING, Notice.FORCE): (State.CLEARING, Action.HURRY),
    (State.CLEARING, Notice.CLEAR): (State.DRAINING, Action.END),
    (State.REAPING, Notice.DONE): (State.DRAINING, Action.END),
    (State.REAPING, Notice.FORCE): (State.REAPING, Action.NOTHING),
    (State.DRAINING, Notice.FORCE): (State.DRAINING, Action.NOTHING),
    (State.DRAINING, Notice.DRAINED): (State.OVER, Action.ANSWER),
    (State.OVER, Notice.FORCE): (State.OVER, Action.NOTHING),
}

_NOT_OF_PROGRAMS = (Notice.UNSTARTED, Notice.READY, Notice.CLOSED, Notice.FAIL)

PROGRAM_IMPOSSIBLE: Pairs = _pairs(
    # Nobody knows of it before it runs: one that cannot be started is answered where it is asked for.
    (State.QUEUED, (Notice.DONE, Notice.FORCE, Notice.CLEAR, Notice.DRAINED, *_NOT_OF_PROGRAMS)),
    # As for a command: no ladder climbs before `FORCE`, and nothing drains before `END`.
    (State.RUNNING, (Notice.BEGIN, Notice.CLEAR, Notice.DRAINED, *_NOT_OF_PROGRAMS)),
    (State.FORCED, (Notice.BEGIN, Notice.DRAINED, *_NOT_OF_PROGRAMS)),
    (State.CLEARING, (Notice.BEGIN, Notice.DONE, Notice.DRAINED, *_NOT_OF_PROGRAMS)),
    (State.REAPING, (Notice.BEGIN, Notice.CLEAR, Notice.DRAINED, *_NOT_OF_PROGRAMS)),
    (State.DRAINING, (Notice.BEGIN, Notice.DONE, Notice.CLEAR, *_NOT_OF_PROGRAMS)),
    (State.OVER, (Notice.BEGIN, Notice.DONE, Notice.CLEAR, Notice.DRAINED, *_NOT_OF_PROGRAMS)),
)

_UNFINISHED = (State.QUEUED, State.RUNNING, State.TAKEN_BACK, State.FORCED)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """End of a run: exit status as a shell would give it, the signal that ended the run, and the cause."""

    exit_code: int
    signal: int | None
    cause: Cause


class Lifecycle:
    """State and outcome of one run."""

    __slots__ = ("_forced", "_reported", "_table", "state")

    def __init__(self, table: Table) -> None:
        self.state = State.QUEUED
        self._table = table
        self._reported: RunOutcome | None = None
        self._forced: Cause | None = None

    def take(self, event: Notice) -> Action:
        """Change the state; return the action to perform.

        Raises:
            ImpossibleEvent: the event cannot happen in this state. Nothing has changed.
        """
        step = self._table.get((self.state, event))
        if step is None:
            raise ImpossibleEvent(f"{event.name} in {self.state.name}")
        self.state, action = step
        return action

    def done(self, outcome: RunOutcome) -> Action:
        """Take `DONE`; the first report is the one that counts."""
        action = self.take(Notice.DONE)
        self._reported = self._reported or outcome
        return action

    def force(self, cause: Cause) -> Action:
        """Take `FORCE`; a cause that comes when the end is known, or begun for another cause, changes nothing."""
        action = self.take(Notice.FORCE)
        if action is not Action.NOTHING and self._forced is None:
            self._forced = cause
        return action

    def close(self) -> Action:
        """Take `CLOSED`; a command that the closing cut short counts as cancelled."""
        action = self.take(Notice.CLOSED)
        if self._reported is None and self._forced is None:
            self._forced = "cancelled"
        return action

    @property
    def is_reported(self) -> bool:
        """Whether the shell or the reaper has reported the end."""
        return self._reported is not None

    @property
    def is_unfinished(self) -> bool:
        """Whether the run, or the shell's part of it, may still go on."""
        return self.state in _UNFINISHED

    @property
    def outcome(self) -> RunOutcome:
        """The answer's exit status, signal and cause, known from `ENDED` and `DRAINING` on."""
        if self._forced is not None:
            return RunOutcome(EXIT_TIMED_OUT if self._forced == "timed_out" else EXIT_CANCELLED, None, self._forced)
        assert self._reported is not None
        return self._reported
