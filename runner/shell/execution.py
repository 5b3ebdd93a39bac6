"""One command of a shell: its files, its time limit, how it may be ended, and its result.

It must not know how the shell runs it (`shell`, `driver`), what its bytes go through (`streams`) or how frames reach
the client (`Sink`).

The files through which a command reaches the shell's driver, and their removal.

It must not open what the driver opens as streams (`streams`, `terminal`).

Sources: `runner.shell.command_driver` says what each file is for.

Making a shell leave the command it runs, as Ctrl-C would.

It must not end a shell that does not obey: that is the ladder's, when somebody wants the command ended.

Sources: signal(7) (which signals end a process by default); `runner.shell.command_driver` says when the shell misses
one request.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from runner.loop.config import STDIN_BUFFER_BYTES
from runner.loop.context import Context
from runner.loop.context import Sink as Sink
from runner.loop.loop import Loop, Timer
from runner.loop.private import open_private, remove_private
from runner.process import process_set, storage
from runner.process.process_set import CommandScope, Process
from runner.shell import command_driver, terminal_driver
from runner.shell import terminal_driver as repl
from runner.shell.ladder import Ladder
from runner.shell.shell import Shell
from runner.shell.terminal import TerminalStreams
from runner.streams.pipes import NO_STREAMS, Leftovers, PipeStreams, StdinPipe, Streams
from runner.wire.protocol import Cause, Error, ErrorCode, Exec, ExecReply, Kind, Started, TerminalSize


def mode_of(request: Exec, *, has_news: bool) -> str:
    """Return the mode word of a command's line on `ctl`; `has_news`: the shell is to be told something before it."""
    if request.terminal is not None:
        return command_driver.WITH_VARIABLES + command_driver.WITH_STDIN
    has_variables = has_news or request.cwd is not None or bool(request.env)
    letters = (command_driver.WITH_VARIABLES if has_variables else "") + (
        command_driver.WITH_STDIN if request.stdin else ""
    )
    return letters or command_driver.PLAIN


def write(shell: Shell, request: Exec, mode: str, *, workspace: str) -> None:
    """Make the files of a command.

    Raises:
        OSError: the private directory is full, say.
    """
    text = repl.text(shell.directory, shell.argv) if request.interactive else request.command
    _write_file(shell.file("cmd"), text)
    if mode == command_driver.PLAIN:
        return
    cwd = None if request.cwd is None else os.path.join(workspace, request.cwd)
    before, after = command_driver.prologue(cwd, request.env), command_driver.epilogue(cwd, request.env)
    if request.terminal is not None:
        before = terminal_driver.enter(shell.directory, interactive=request.interactive) + before
        after += (repl.LEAVE if request.interactive else "") + terminal_driver.leave(shell.directory)
    if shell.is_deaf:
        before = terminal_driver.restore(shell.directory) + before
    _write_file(shell.file("pre"), command_driver.news(shell.news()) + before)
    _write_file(shell.file("post"), after)


def remove(shell: Shell, mode: str) -> None:
    """Remove what `write` made, as far as it is there."""
    for name in ("cmd",) if mode == command_driver.PLAIN else ("cmd", "pre", "post"):
        remove_private(shell.file(name))


def _write_file(path: str, text: str) -> None:
    content = os.fsencode(text)
    fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        while content:
            content = content[os.write(fd, content) :]
    finally:
        os.close(fd)


_FIRST_REPEAT_S = 0.001
_LAST_REPEAT_S = 0.5
_YOUNG_TICKS = 3
_LINE_DELAY_S = 0.005

_HARMLESS = frozenset(
    {
        signal.SIGCHLD,
        signal.SIGCONT,
        signal.SIGURG,
        signal.SIGWINCH,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)


def ends_by_default(number: int) -> bool:
    """Return whether a process that does nothing about the signal is ended by it."""
    return number not in _HARMLESS


class Interrupt:
    """Asks the shell, then signals what the command started; and both a few times more. The shell may be just before or
    after the command and ignore it there; it may be about to start a program, or a program about to begin, which loses
    the signal. A program older than that gets it once."""

    def __init__(self, loop: Loop, shell: Shell, number: int, find: Callable[[], list[Process]]) -> None:
        self._loop = loop
        self._shell = shell
        self._number = number
        self._find = find
        self._since = process_set.now().tick - _YOUNG_TICKS
        self._signalled: set[Process] = set()
        self._repeat_s = _FIRST_REPEAT_S
        self._timer: Timer | None = None

    def ask(self) -> None:
        self._shell.abandon()  # first: it must not go on with the next program when this one ends
        for process in self._find():
            if process not in self._signalled or process.start_tick >= self._since:
                self._signalled.add(process)
                process_set.send_signal(process.pid, self._number)
        if self._repeat_s <= _LAST_REPEAT_S:
            self._timer = self._loop.call_later(self._repeat_s, self.ask, lambda _error: None)
            self._repeat_s *= 2

    def stop(self) -> None:
        """The shell has left the command."""
        if self._timer is not None:
            self._timer.cancel()


class LineInterrupt:
    """Asks a shell that reads lines to leave the one it runs: once the key that was typed has done its own work, for
    bash can forget one of two traps that come together; and again while the shell computes. `on_over` is called when it
    does not any more, or for too long: what was typed after the key is for the shell then, and no line of it is hit."""

    def __init__(self, loop: Loop, shell: Shell, on_over: Callable[[], None]) -> None:
        self._loop = loop
        self._shell = shell
        self._on_over = on_over
        self._repeat_s = _LINE_DELAY_S
        self._timer = loop.call_later(_LINE_DELAY_S, self._ask, lambda _error: on_over())

    def stop(self) -> None:
        """The shell reads no more lines, or another key was typed."""
        self._timer.cancel()

    def _ask(self) -> None:
        self._shell.signal(repl.LINE_SIGNAL)
        self._timer = self._loop.call_later(self._repeat_s, self._look, lambda _error: self._on_over())
        self._repeat_s *= 4

    def _look(self) -> None:
        if (
            self._repeat_s <= _LAST_REPEAT_S
            and self._shell.pid is not None
            and process_set.is_computing(self._shell.pid)
        ):
            self._ask()
        else:
            self._on_over()


EXIT_TIMED_OUT = 124
EXIT_CANCELLED = 130
_EXIT_ABANDONED = 130
_SIGNAL_BASE = 128
_LAST_SIGNAL = 64
_CTRL_C = b"\x03"
_NEVER = process_set.Moment(0, 0)
_SETTLE_S = 0.001
"""A command that ends sooner is not watched: its output is collected at its end, all of stdout first."""


class Execution:
    """From request to reply.

    `on_over` is called when the shell may take the next command, which can be before the reply is out: a client that
    reads slowly holds up its own output only.
    """

    def __init__(
        self,
        context: Context,
        request: Exec,
        sink: Sink,
        shell: Shell,
        leftovers: Leftovers,
        *,
        on_over: Callable[[Execution], None],
    ) -> None:
        self.request = request
        self.shell_restarted = False
        self.has_ended = False
        self.is_taken_back = False
        self._sink: Sink | None = sink
        self._context = context
        self._on_over = on_over
        self._shell = shell
        self._mode = ""
        self._has_begun = False
        self._began = _NEVER
        self._streams = self._make_streams(leftovers)
        self._timer: Timer | None = None
        self._settled: Timer | None = None
        self._ladder: Ladder | None = None
        self._interrupt: Interrupt | LineInterrupt | None = None
        self._left_by: int | None = None
        self._forced: Cause | None = None
        self._result: tuple[int, int | None, Cause] | None = None
        self._cwd: bytes | None = None
        self._started_s = 0.0
        self._duration_us = 0
        self._written_bytes = -1
        self._room = storage.RoomGauge()
        context.registry.add(request.exec_id, self)

    # What the engine tells -----------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Hand the command to the waiting shell; a second time if its predecessor never began it.

        Raises:
            OSError: its files could not be made.
        """
        is_first, self._has_begun = not self._has_begun, True
        self.is_taken_back = False
        self._mode = mode_of(self.request, has_news=self._shell.has_news)
        write(self._shell, self.request, self._mode, workspace=self._context.config.workspace)
        self._streams.open(needs_input_file=self._mode != command_driver.PLAIN)
        self._began = process_set.now()
        self._shell.hand_over(number, self._mode, on_terminal=self.request.terminal is not None)
        self._settled = self._context.loop.call_later(_SETTLE_S, self._on_settled, self._on_error)
        if is_first:
            self._context.config.passing("runner.exec.started")
            self._started_s = time.monotonic()
            if self._sink is not None:
                self._sink.start(Started(self.request.exec_id))
            if self.request.timeout_ms is not None:
                self._timer = self._context.loop.call_later(
                    self.request.timeout_ms / 1000, lambda: self._force("timed_out"), self._on_error
                )

    def _on_settled(self) -> None:
        self._room.look(self._context)
        self.on_drained()

    def on_status(self, status: int | None) -> None:
        """The shell reports: None when the command holds its standard input, else its exit status."""
        if status is None:
            self._streams.on_reader()
            return
        self._written_bytes = self._shell.written_bytes
        if status == _EXIT_ABANDONED and self._left_by is not None:
            status = _SIGNAL_BASE + self._left_by
        if _SIGNAL_BASE < status <= _SIGNAL_BASE + _LAST_SIGNAL:
            self._shell_done(status, status - _SIGNAL_BASE, "signalled")
        else:
            self._shell_done(status, None, "exited")

    def on_shell_death(self, wait_status: int) -> None:
        """The shell process ended while it ran the command."""
        self.shell_restarted = True
        self._written_bytes = self._shell.written_bytes
        code = os.waitstatus_to_exitcode(wait_status)
        if code < 0:
            self._shell_done(_SIGNAL_BASE - code, -code, "shell_died")
        else:
            self._shell_done(code, None, "exited")

    def on_shell_closed(self) -> None:
        """The shell is closed, nothing of it is left, and no other comes."""
        if self._result is None:
            self._forced = self._forced or "cancelled"
            self._result = (0, None, self._forced)
        if self._has_begun and not self.has_ended:
            self._end()
        self.has_ended = True
        if self._cwd is None:
            self.conclude(self._shell.cwd)

    @property
    def is_begun(self) -> bool:
        """Whether the shell has begun the command."""
        return self._streams.is_begun

    @property
    def can_be_retried(self) -> bool:
        """Whether the shell never began the command, and its end is still open."""
        return self._result is None and self._forced is None and not self.is_begun

    def take_back(self) -> None:
        """The shell never began the command; another one gets it."""
        self.is_taken_back = True
        self._remove_files()

    def _remove_files(self) -> None:
        self._streams.stop_input()
        self._streams.close()
        if self._has_begun:
            remove(self._shell, self._mode)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Answer with an error instead of a result; the command is not running."""
        self.has_ended = True
        self._stop_clocks()
        self._remove_files()
        if self._sink is not None:
            self._sink.finish(Error(code, message))
            self._sink = None
        self._over()
        self._streams = NO_STREAMS

    def conclude(self, cwd: bytes) -> None:
        """The command has ended and a shell waits in `cwd`: the reply follows the last output."""
        self._cwd = cwd
        self._over()
        self._reply_if_drained()

    def _over(self) -> None:
        self._context.registry.remove(self.request.exec_id, self)
        self._on_over(self)

    # What the client tells -----------------------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        self._streams.feed(data)

    def on_end(self) -> None:
        self._streams.end()

    def on_cancel(self) -> None:
        self._force("cancelled")

    def on_close(self) -> None:
        """Nobody waits for the answer any more."""
        self._sink = None
        self.on_drained()
        self._force("cancelled")

    def on_drained(self) -> None:
        """The client has taken enough of what was sent."""
        self._streams.resume()

    @property
    def wants_input(self) -> bool:
        return self._streams.buffered_bytes < STDIN_BUFFER_BYTES

    # What others tell, by its id -----------------------------------------------------------------------------------

    def signal(self, number: int) -> bool:
        """Signal what the command started; return whether it runs. SIGINT makes the shell leave the command, too; so
        does what ends a process, when there is none."""
        if not self._is_running:
            return False
        if self.request.interactive and number == signal.SIGINT:
            self._streams.feed(_CTRL_C)
            return True
        found = self._scope().find()
        if number == signal.SIGINT or (not found and ends_by_default(number)):
            self._leave(number)
        else:
            process_set.signal_all(found, number)
        return True

    def cancel(self, *, now: bool) -> None:
        if self._ladder is None:
            self._force("cancelled", now=now)
        elif now:
            self._ladder.hurry()

    def resize(self, size: TerminalSize) -> bool:
        return self.request.terminal is not None and self._result is None and self._streams.resize(size)

    @property
    def _is_running(self) -> bool:
        return self._has_begun and self._result is None and self._forced is None and not self.is_taken_back

    def _on_key(self, number: int, is_raw: bool, release: Callable[[], None]) -> bytes | None:
        """Ctrl-C or its like was typed. The terminal tells all that run; only the shell itself may be deaf to it."""
        if not self._is_running or any(process_set.heeds(each.pid, number) for each in self._scope().find()):
            return b""
        if not self.request.interactive:
            self._leave(number)
            return b""
        if is_raw:  # readline reads
            return b"\n"
        self._stop_interrupt()
        self._interrupt = LineInterrupt(self._context.loop, self._shell, release)
        return None

    def _leave(self, number: int) -> None:
        self._stop_interrupt()
        self._left_by = number
        self._interrupt = Interrupt(self._context.loop, self._shell, number, self._scope().find)
        self._interrupt.ask()

    def _scope(self) -> CommandScope:
        """Return what the command has started."""
        shell, reaper = self._shell, self._context.reaper
        return CommandScope(self._began, lambda: shell.pid, leaders=lambda: reaper.watched, group=shell.group)

    # The end -------------------------------------------------------------------------------------------------------

    def _force(self, cause: Cause, *, now: bool = False) -> None:
        """Begin to end the command, unless it has ended or is ending already."""
        if self._result is not None or self._forced is not None or self._shell.is_closed:
            return
        self._forced = cause
        if not self._has_begun:  # still queued
            self._result = (0, None, cause)
            self.has_ended = True
            self.conclude(self._shell.cwd)
            return
        if self.is_taken_back or self._shell.take_back():  # between two shells, or not read yet
            self._result = (0, None, cause)
            self._end()
            return
        self._ladder = Ladder(
            *(self._context, self._scope()),
            shell=self._shell,
            is_begun=lambda: self.is_begun,
            on_clear=self._end,
            now=now,
        )
        self._ladder.climb()

    def _shell_done(self, exit_code: int, signal_number: int | None, cause: Cause) -> None:
        if self._result is not None:
            return
        self._result = (exit_code, signal_number, cause)
        if self._ladder is None:
            self._end()
        else:
            self._ladder.shell_is_busy = False
            self._ladder.climb()

    def _end(self) -> None:
        """Nothing of the command runs in the shell any more, nor anywhere if it was ended by force."""
        self._duration_us = int((time.monotonic() - self._started_s) * 1_000_000)
        self.has_ended = True
        self._stop_clocks()
        self._streams.stop_input()
        remove(self._shell, self._mode)
        self._streams.finish(may_read=self._sink is None or not self._sink.is_full)
        self._context.config.passing("runner.exec.ended")
        if self._shell.is_ready:
            self.conclude(self._shell.cwd)

    def _reply_if_drained(self) -> None:
        if self._cwd is None or not self._streams.is_done:
            return
        self._streams.close()
        self._streams = NO_STREAMS
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.finish(self._reply(self._cwd))

    def _reply(self, cwd: bytes) -> ExecReply:
        assert self._result is not None
        exit_code, signal_number, cause = self._result
        if self._forced is not None:
            cause, signal_number = self._forced, None
            exit_code = EXIT_TIMED_OUT if cause == "timed_out" else EXIT_CANCELLED
        is_full, was_filled = self._room.read(self._context, has_failed=self._has_begun and exit_code != 0)
        return ExecReply(
            exec_id=self.request.exec_id,
            exit_code=exit_code,
            signal=signal_number,
            cause=cause,
            cwd=os.fsdecode(cwd),
            duration_us=self._duration_us,
            shell_restarted=self.shell_restarted,
            disk_full=is_full,
            written_bytes=self._written_bytes,
            disk_filled=was_filled,
        )

    def _stop_clocks(self) -> None:
        """Stop them and let go of them: what refers back here would keep this for ever, as PID 1 collects no cycles."""
        for timer in (self._timer, self._settled):
            if timer is not None:
                timer.cancel()
        if self._ladder is not None:
            self._ladder.stop()
        self._timer = self._settled = self._ladder = None
        self._stop_interrupt()

    def _stop_interrupt(self) -> None:
        if self._interrupt is not None:
            self._interrupt.stop()
            self._interrupt = None

    def _on_error(self, _error: Exception) -> None:
        self.fail("IO_ERROR", "the command was lost")
        self._shell.replace()

    # Streams -------------------------------------------------------------------------------------------------------

    def _make_streams(self, leftovers: Leftovers) -> Streams:
        request, loop, file = self.request, self._context.loop, self._shell.file
        if request.terminal is not None:
            return TerminalStreams(
                *(self._context, self._shell.identity, file, leftovers, request.terminal),
                on_output=self._on_output,
                on_done=self._reply_if_drained,
                on_room=self._refresh_input,
                on_key=self._on_key,
            )
        stdin = StdinPipe(loop, self._refresh_input) if request.stdin else None
        return PipeStreams(
            *(loop, file, leftovers), stdin=stdin, on_output=self._on_output, on_done=self._reply_if_drained
        )

    def _on_output(self, kind: Kind, chunk: bytes) -> None:
        if self._sink is None:
            return
        self._sink.send(kind, chunk)
        if self._sink is not None and self._sink.is_full:
            self._streams.pause()

    def _refresh_input(self) -> None:
        if self._sink is not None:
            self._sink.refresh_input()
