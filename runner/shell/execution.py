"""One command of a shell: the files that bring it to the shell's driver, its streams, its end, and its result.

`Execution` performs the actions of `runner.shell.lifecycle.COMMAND`. The queue in front of the shell tells it when its
turn is, and all news of the shell.

Sources: `runner.shell.command_driver` (what each file and each mode is for).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from runner.loop.context import Context, Sink
from runner.loop.loop import Timer
from runner.process import process_set
from runner.process.process_set import CommandSet
from runner.shell import command_driver, link, terminal_driver
from runner.shell.command_streams import CommandPipes, CommandTerminal
from runner.shell.ending import Interrupt, Ladder, LineInterrupt, ends_by_default
from runner.shell.lifecycle import COMMAND, Action, Notice, RunOutcome, State
from runner.shell.run import SIGNAL_BASE, Run
from runner.shell.shell import Shell
from runner.streams.flow import AbandonedPipes
from runner.streams.streams import Streams
from runner.wire.protocol import Cause, Error, ErrorCode, Exec, TerminalSize

_EXIT_ABANDONED = 130
_LAST_SIGNAL = 64
_CTRL_C = b"\x03"
_SETTLE_S = 0.001
"""A command that ends sooner is not watched: its output and the reports on it are collected at its end, all of one
stream first."""


class Execution(Run):
    """One command, from its request to its answer.

    `on_over` is called when the shell may take the next command, which can be before the answer is out: a client that
    reads slowly holds up its own output only.
    """

    def __init__(
        self,
        context: Context,
        request: Exec,
        sink: Sink,
        shell: Shell,
        leftovers: AbandonedPipes,
        *,
        on_over: Callable[[Execution], None],
    ) -> None:
        super().__init__(context, request, sink, leftovers, COMMAND)
        self.request = request
        self.shell_restarted = False
        self._on_over = on_over
        self._shell = shell
        self._streams = self._make_streams()
        self._name = ""
        self.is_begun = False
        """Whether the shell has begun the command."""
        self._is_settled = self._tells_end = False
        self._began = process_set.Moment(0, 0)
        self._settled: Timer | None = None
        self._wait_limit: Timer | None = None
        self._interrupt: Interrupt | LineInterrupt | None = None
        self._left_by: int | None = None
        self._error: Error | None = None
        self._cwd = b""
        self._written_bytes = -1
        context.registry.add(request.exec_id, self)

    def _make_streams(self) -> Streams:
        request, shell = self.request, self._shell
        if request.terminal is not None:
            return CommandTerminal(self._context, shell.identity, shell.files, self, request.terminal)
        return CommandPipes(self._context.loop, shell.files, self, stdin=request.stdin, merged=request.merged)

    def _perform(self, action: Action) -> None:
        match action:
            case Action.NOTHING:
                pass
            case Action.START:
                self._hand_over()
                self._context.config.passing("runner.exec.started")
                self._announce()
            case Action.START_AGAIN:
                self._hand_over()
            case Action.TAKE_BACK:
                self._streams.close(self._leftovers)
                self._remove_command()
            case Action.FORCE:
                self._climb()
            case Action.HURRY:
                self._hurry()
            case Action.CLIMB:
                self._climb_on()
            case Action.END:
                self._end()
            case Action.CONCLUDE:
                self._conclude()
            case Action.ANSWER:
                self._answer()
            case Action.FAIL:
                assert self._error is not None
                self._give_up(self._error)

    def limit_wait(self, queue_timeout_ms: int) -> None:
        """Refuse the command if its turn has not come after that time."""
        self._wait_limit = self._context.loop.call_later(queue_timeout_ms / 1000, self._on_waited, self._on_error)

    def _on_waited(self) -> None:
        self.fail("QUEUE_TIMEOUT", "the shell was busy for too long")

    # News of the queue and the shell --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Hand the command to the waiting shell.

        Raises:
            OSError: the files of the command could not be made; it is the caller's to `fail` it.
        """
        self._take(Notice.BEGIN)

    def on_unstarted(self, *, may_retry: bool) -> None:
        """Give the command to the next shell: this one never began it, and is being replaced."""
        if may_retry or not self._is_running:  # one that is to end anyway is not tried again, and does not fail
            self._take(Notice.UNSTARTED)
        else:
            self.fail("SHELL_FAILED", "the shell does not take commands")

    def on_begun(self) -> None:
        """Let input and output flow: the shell has begun the command, and holds its standard input if it has one."""
        self.is_begun = True
        self._streams.on_reader()
        if self._is_settled:
            self._look_on()
        elif self._tells_end:
            self._shell.look_away()

    def on_status(self, status: int) -> None:
        """Take the status of the command, `$?` of the shell: the command has ended."""
        self._written_bytes = self._shell.written_bytes
        if status == _EXIT_ABANDONED and self._left_by is not None:
            status = SIGNAL_BASE + self._left_by  # the shell left it for a signal of ours, and knows no number
        if SIGNAL_BASE < status <= SIGNAL_BASE + _LAST_SIGNAL:
            outcome = RunOutcome(status, status - SIGNAL_BASE, "signalled")
        else:
            outcome = RunOutcome(status, None, "exited")
        self._perform(self._life.done(outcome))

    def on_shell_death(self, wait_status: int) -> None:
        """Take the wait status of the shell, which died while it had the command."""
        self.shell_restarted = True
        self._written_bytes = self._shell.written_bytes
        code = os.waitstatus_to_exitcode(wait_status)
        outcome = RunOutcome(SIGNAL_BASE - code, -code, "shell_died") if code < 0 else RunOutcome(code, None, "exited")
        self._perform(self._life.done(outcome))

    def on_shell_ready(self) -> None:
        """Answer a command that has ended: a successor of its shell waits."""
        self._take(Notice.READY)

    def on_no_shell(self) -> None:
        """Fail, for the shell has no successor; but answer a command whose result is known, for that needs none."""
        if self._life.state is State.ENDED:
            self._take(Notice.READY)
        else:
            self.fail("SHELL_FAILED", self._shell.failure)

    def on_shell_closed(self) -> None:
        """End and answer: the shell is closed, nothing of it is left, and no other comes."""
        self._perform(self._life.close())
        if self._life.state is State.ENDED:  # else it was answered with an error on the way
            self._take(Notice.READY)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Answer with an error instead of a result; the command is not running."""
        self._error = Error(code, message)
        self._take(Notice.FAIL)

    @property
    def is_taken_back(self) -> bool:
        """Whether the command waits for the successor of a shell that never began it."""
        return self._life.state is State.TAKEN_BACK

    @property
    def is_withdrawn(self) -> bool:
        """Whether the command has ended without a report of a shell, for none began it."""
        return self._life.state is State.ENDED and not self._life.is_reported

    @property
    def is_unstarted(self) -> bool:
        """Whether the shell has the command and has not begun it, and nobody wants its end."""
        return self._is_running and not self.is_begun

    # Actions --------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        self._end_wait()
        self._name = link.new_name(self._letter())
        self.is_begun = self._is_settled = False
        self._write_files()
        self._streams.open(self._name, needs_input_file=not self._is_plain)
        self._began = self._shell.clock.now()
        # A short command ends before PID 1 listens, and wakes it once (twice, if PID 1 must hear its begin): the shell
        # reports, then lets go of the output.
        self._tells_end = self._streams.await_end(self._shell.listen, self._on_error)
        is_heard = not self._tells_end or self._streams.must_hear_begin
        self._shell.hand_over(self._name, on_terminal=self.request.terminal is not None, is_heard=is_heard)
        self._settled = self._context.loop.call_later(_SETTLE_S, self._on_settled, self._on_error)

    def _on_settled(self) -> None:
        self._is_settled = True
        self._limit_time(_SETTLE_S)  # most commands have ended by now, and need no clock
        if self.is_begun:
            self._look_on()
        self._shell.listen()

    def _look_on(self) -> None:
        """Read output as it comes. Not before the shell has begun: another writer would have the order from a thief."""
        self._room.look(self._context)
        self._streams.resume()

    def _climb(self) -> None:
        self._ladder = Ladder(
            *(self._context, self._processes()),
            shell=self._shell,
            is_begun=lambda: self.is_begun,
            on_clear=lambda: self._take(Notice.CLEAR),
            on_error=lambda _error: self.fail("IO_ERROR", "the command was lost"),
            now=self._in_hurry,
        )
        if not self.is_begun:
            self._empty_command()
        self._ladder.climb()

    def _empty_command(self) -> None:
        """Have the shell run nothing, if it ever begins. Not by truncation: it may read the file at this instant, and
        half a command is another command."""
        with contextlib.suppress(OSError):
            self._shell.files.write("none", command_driver.command_text("", link=self._shell.link_number).encode())
            self._shell.files.rename("none", "cmd")

    def _climb_on(self) -> None:
        assert self._ladder is not None
        self._ladder.shell_is_busy = False
        self._ladder.climb()

    def _end(self) -> None:
        """Nothing of the command runs in the shell any more, nor anywhere if it was ended by force."""
        self._remove_command()
        self._finish_streams()
        self._context.config.passing("runner.exec.ended")
        if self._shell.is_ready:
            self._take(Notice.READY)

    def _conclude(self) -> None:
        self._cwd = self._shell.cwd
        self._let_go()
        self.on_output_done()

    def _answer(self) -> None:
        self._answer_with(
            lambda: self._reply(cwd=self._cwd, shell_restarted=self.shell_restarted, written_bytes=self._written_bytes)
        )

    def _give_up(self, error: Error) -> None:
        self._stop_clocks()
        self._remove_command()
        try:
            self._answer_with(lambda: error)
        finally:
            self._let_go()
            self._shell.listen()  # the end of what it may still run frees it for the next command

    def _let_go(self) -> None:
        self._context.registry.remove(self._id, self)
        self._on_over(self)

    def _force(self, cause: Cause) -> None:
        if not self._shell.is_closed:  # else all of it is being killed, and `on_shell_closed` follows
            super()._force(cause)

    def _on_error(self, _error: Exception) -> None:
        self.fail("IO_ERROR", "the command was lost")
        self._shell.replace()

    def _stop_clocks(self) -> None:
        super()._stop_clocks()
        if self._settled is not None:
            self._settled.cancel()
            self._settled = None
        self._end_wait()
        self._stop_interrupt()

    def _end_wait(self) -> None:
        if self._wait_limit is not None:
            self._wait_limit.cancel()
            self._wait_limit = None

    # Files ----------------------------------------------------------------------------------------------------------

    def _letter(self) -> str:
        """Return the first letter of the order's name."""
        request = self.request
        if request.terminal is not None:
            return command_driver.WITH_BOTH
        if self._shell.has_news or request.cwd is not None or request.env:
            return command_driver.WITH_BOTH if request.stdin else command_driver.WITH_VARIABLES
        return command_driver.WITH_STDIN if request.stdin else command_driver.PLAIN

    @property
    def _is_plain(self) -> bool:
        """Whether the command has neither `pre` and `post` nor a file for standard input."""
        return self._name.startswith(command_driver.PLAIN)

    def _write_files(self) -> None:
        """Make `cmd`, and what comes before and after it."""
        request, shell = self.request, self._shell
        text = terminal_driver.read_lines(shell.files.path, shell.argv) if request.interactive else request.command
        before = after = ""
        if not self._is_plain:
            cwd = None if request.cwd is None else os.path.join(self._context.config.workspace, request.cwd)
            before, after = command_driver.prologue(cwd, request.env), command_driver.epilogue(cwd, request.env)
            if request.terminal is not None:
                before = terminal_driver.enter(shell.files.path, interactive=request.interactive) + before
                after += terminal_driver.leave(shell.files.path, interactive=request.interactive)
            if shell.is_deaf:
                before = terminal_driver.restore() + before
            before = command_driver.news(shell.news()) + before
            shell.files.write("post", os.fsencode(after))
            if not shell.is_bash:
                shell.files.write("pre", os.fsencode(command_driver.before_text(before)))
        shell.files.write("cmd", os.fsencode(command_driver.command_text(text, before, link=shell.link_number)))

    def _remove_command(self) -> None:
        """Remove the files of `_write_files`, as far as they are there. A command that no shell was handed has none."""
        if not self._name:
            return
        for name in ("cmd",) if self._is_plain else ("cmd", "pre", "post"):
            self._shell.files.unlink(name)

    # Signals and keys -----------------------------------------------------------------------------------------------

    @property
    def _is_running(self) -> bool:
        return self._life.state is State.RUNNING

    def signal(self, number: int) -> bool:
        """Signal what the command has started; return whether it runs. SIGINT makes the shell leave the command, too;
        so does a signal that ends a process by default, when there is no process."""
        if not self._is_running:
            return False
        if self.request.interactive and number == signal.SIGINT:
            self._streams.feed(_CTRL_C)
            return True
        found = self._processes().find()
        if number == signal.SIGINT or (not found and ends_by_default(number)):
            self._leave(number)
        else:
            process_set.signal_all(found, number)
        return True

    def resize(self, size: TerminalSize) -> bool:
        return self._life.is_unfinished and super().resize(size)

    def on_key(self, number: int, is_raw: Callable[[], bool], release: Callable[[], None]) -> bytes | None:
        """Ctrl-C or its like is typed. The terminal tells all that run; only the shell itself may be deaf to it."""
        if not self._is_running or any(process_set.heeds(each.pid, number) for each in self._processes().find()):
            return None
        if not self.request.interactive:
            self._leave(number)
            return None
        self._stop_interrupt()
        was_raw = is_raw()  # readline reads, and would go on without a line end
        self._interrupt = LineInterrupt(self._context.loop, self._shell, release, is_raw if was_raw else None)
        return b"\n" if was_raw else b""

    def _leave(self, number: int) -> None:
        """Have the shell leave the command."""
        self._stop_interrupt()
        self._left_by = number
        self._interrupt = Interrupt(self._context.loop, self._shell, number, self._processes().find)
        self._interrupt.ask()

    def _stop_interrupt(self) -> None:
        if self._interrupt is not None:
            self._interrupt.stop()
            self._interrupt = None

    def _processes(self) -> CommandSet:
        """Return the set of processes that the command has started."""
        shell, reaper = self._shell, self._context.reaper
        return CommandSet(self._began, lambda: shell.pid, leaders=lambda: reaper.watched, group=shell.group)
