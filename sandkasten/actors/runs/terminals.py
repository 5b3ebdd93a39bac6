"""The terminals of one session: programs with a terminal of their own, and views of its persistent shells.

A terminal of its own is a run. A view shows the commands of a persistent shell and their output. A viewer who takes the
shell over queues a run in it, a prompt: commands wait behind a prompt as behind any other run.

A `Screen` observes a run, or all runs of a shell, and holds the bytes for the viewers. A view begins with the past of
its shell, read from the logs of earlier runs when the view is opened: a shell without viewers costs nothing. The past
ends exactly where the screen, which observes the running command, goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import attrs
import trio

from sandkasten.actors.runs.accounting import cut_short
from sandkasten.actors.runs.run import Run, RunClaim, RunObserver, RunRequest, Shell
from sandkasten.actors.runs.runs import Runs
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.errors import Capacity, ExecEnded, ExecGone, PermissionDenied, TerminalNotFound
from sandkasten.model import (
    Cause,
    ExecEnd,
    ExecInfo,
    ExecKind,
    ExecSpec,
    OnDisconnect,
    Output,
    Stream,
    TerminalSize,
    TerminalSpec,
)

SCROLLBACK_BYTES = 256 * 1024
WINDOW_BYTES = 128 * 1024
"""Bytes of output that the fastest viewer may be behind before the terminal's program waits."""

PIECE_BYTES = 64 * 1024
_MERGE_BYTES = 4096
_DIM, _PLAIN = b"\x1b[2m", b"\x1b[0m"


class Screen(RunObserver):
    """The screen of one terminal: a bounded scroll-back that each viewer follows at its own pace. A viewer that falls
    behind what is kept skips ahead and is told by how much. No I/O."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._first = 0
        self._end = 0
        self._viewers: set[ScreenReader] = set()
        self._changed = trio.Event()
        self._last = b""
        self._held: deque[tuple[bytes, bool]] | None = None
        self._held_bytes = 0
        self.is_closed = False

    # Writing ----------------------------------------------------------------------------------------------------

    def show(self, data: bytes, *, on_new_line: bool = False) -> None:
        """Append bytes; while the screen is held, keep them until `release`."""
        if self._held is None:
            self._append(data, on_new_line)
            return
        self._held.append((data, on_new_line))
        self._held_bytes += len(data)
        while self._held_bytes > SCROLLBACK_BYTES and len(self._held) > 1:
            self._held_bytes -= len(self._held.popleft()[0])

    def hold(self) -> None:
        """Keep new bytes back until `release`, so that the past can be put before them."""
        self._held, self._held_bytes = deque(), 0

    def release(self) -> None:
        """Append the bytes that were kept back."""
        held, self._held = self._held or (), None
        for data, on_new_line in held:
            self._append(data, on_new_line)

    def _append(self, data: bytes, on_new_line: bool) -> None:
        if on_new_line and self._last not in (b"", b"\n"):
            data = b"\r\n" + data
        if not data:
            return
        if self._chunks and len(self._chunks[-1]) + len(data) <= _MERGE_BYTES:
            self._chunks[-1] += data
        else:
            self._chunks.append(data)
        self._end += len(data)
        while self._end - self._first > SCROLLBACK_BYTES and len(self._chunks) > 1:
            self._first += len(self._chunks.popleft())
        self._last = data[-1:]
        self._wake()

    def close(self) -> None:
        """End the screen: viewers read the rest and stop."""
        self.release()
        self.is_closed = True
        self._wake()

    @property
    def is_lagging(self) -> bool:
        """Whether there are viewers and every one of them lags."""
        is_watched = bool(self._viewers) and not self.is_closed
        return is_watched and all(each.lag_bytes > WINDOW_BYTES for each in self._viewers)

    # Reading ----------------------------------------------------------------------------------------------------

    def reader(self) -> ScreenReader:
        """Return a reader for a new viewer, at the beginning of the scroll-back."""
        viewer = ScreenReader(self)
        self._viewers.add(viewer)
        return viewer

    @property
    def end_offset(self) -> int:
        return self._end

    @property
    def first_offset(self) -> int:
        return self._first

    def piece_at(self, offset: int) -> bytes:
        """Return the scroll-back from `offset` on, at most `PIECE_BYTES`."""
        position, parts, size = self._first, [], 0
        for chunk in self._chunks:
            if position + len(chunk) > offset:
                part = chunk[max(0, offset - position) :]
                parts.append(part)
                size += len(part)
                if size >= PIECE_BYTES:
                    break
            position += len(chunk)
        return b"".join(parts)[:PIECE_BYTES]

    def leave(self, viewer: ScreenReader) -> None:
        self._viewers.discard(viewer)
        self._wake()

    async def wait_change(self) -> None:
        await self._changed.wait()

    def moved(self) -> None:
        """Wake a run that waits for room: a viewer has read."""
        self._wake()

    def _wake(self) -> None:
        if self._changed.statistics().tasks_waiting:
            self._changed.set()
            self._changed = trio.Event()


class ProgramScreen(Screen):
    """The screen of a terminal of its own: the bytes of one run, which is held up while all viewers lag."""

    def wrote(self, run: Run, piece: Output) -> bool:
        self.show(piece.data)
        return self.is_lagging

    async def wait_room(self, run: Run) -> None:
        while self.is_lagging:
            await self._changed.wait()


class ShellScreen(Screen):
    """The screen of a watched shell: commands, their output as text, and notes of ends. Never holds a run up."""

    def began(self, run: Run) -> None:
        """Show the command of a run, unless a viewer types it."""
        if run.size is None:
            self.show(_command_line(run), on_new_line=True)

    def wrote(self, run: Run, piece: Output) -> bool:
        self.show(piece.data if run.size is not None else _lines(piece.data))
        return False

    def ended(self, run: Run) -> None:
        """Show how a run ended, if it did not end well, and in any case that a prompt is over."""
        if note := _end_note(run):
            self.show(note, on_new_line=True)

    def show_past(self, run: Run, data: bytes, *, is_over: bool) -> None:
        """Show the output of a run from before the screen was there, though the screen is held."""
        if run.size is None:
            self._append(_command_line(run), True)
            data = _lines(data)
        for start in range(0, len(data), PIECE_BYTES):
            self._append(data[start : start + PIECE_BYTES], False)
        if is_over and (note := _end_note(run)):
            self._append(note, True)


class ScreenReader:
    """The place of one viewer: an async iterator of pieces that ends when the screen is closed and all is read."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._offset = screen.first_offset
        self.skipped_bytes = 0

    @property
    def lag_bytes(self) -> int:
        return self._screen.end_offset - self._offset

    def __aiter__(self) -> ScreenReader:
        return self

    async def __anext__(self) -> bytes:
        while self._offset == self._screen.end_offset:
            if self._screen.is_closed:
                raise StopAsyncIteration
            await self._screen.wait_change()
        await trio.lowlevel.checkpoint()
        missed = max(0, self._screen.first_offset - self._offset)
        self.skipped_bytes += missed
        self._offset += missed
        piece = self._screen.piece_at(self._offset)
        self._offset += len(piece)
        self._screen.moved()
        return piece

    def close(self) -> None:
        self._screen.leave(self)


def _command_line(run: Run) -> bytes:
    command = "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in run.request.command
    )
    return _DIM + b"$ " + _lines(command.encode()) + _PLAIN + b"\r\n"


def _end_note(run: Run) -> bytes:
    """Return the note of an end; empty for a good end."""
    if run.size is not None:
        text = "given back"
    elif run.end is not None and run.end.exit_code != 0:
        text = f"{run.end.cause.value}: {run.end.exit_code}"
    else:
        return b""
    return _DIM + f"[{text}]".encode() + _PLAIN + b"\r\n"


def _lines(data: bytes) -> bytes:
    """Return text for a screen in raw mode."""
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


MAX_PAST_RUNS = 100
_LINE_BYTES = 64
"""The cost of a command beside its text and its output."""


@attrs.frozen
class PastRun:
    """A run and the part of its output that is to be shown, by offset over both streams. `is_over`: it has ended."""

    run: Run
    start: int
    end: int
    is_over: bool

    async def read(self) -> bytes:
        """Return that part, from a whole line on unless it is all output; empty if it is not kept any more."""
        if self.start == self.end:
            return b""
        assert self.run.log is not None
        try:
            data = (await self.run.log.read(None, self.start, self.end - self.start)).data
        except ExecGone:
            return b""
        _, newline, rest = data.partition(b"\n")
        return rest if self.start and newline else data


def past_of(shell: Shell, newest_first: Iterable[Run]) -> Sequence[PastRun]:
    """Return the runs of a shell so far, the oldest first, and no more than a screen holds."""
    found: list[PastRun] = []
    room_bytes = SCROLLBACK_BYTES
    for run in newest_first:
        if room_bytes <= 0 or len(found) >= MAX_PAST_RUNS:
            break
        if not _was_in(shell, run) or run.log is None:
            continue
        end = run.log.kept.total(None)
        start = max(run.log.kept.first_offset(None), end - room_bytes)
        found.append(PastRun(run, start, end, run.has_ended))
        room_bytes -= end - start + len(run.request.command) + _LINE_BYTES
    return found[::-1]


def _was_in(shell: Shell, run: Run) -> bool:
    """Whether a run has begun in `shell`. A run that ended under an earlier daemon knows only the shell's name."""
    if run.clock.started_at is None:
        return False
    return run.shell is shell or (run.shell is None and run.request.shell == shell.name)


MAX_TERMINALS = 16
MAX_VIEWERS = 64
_NAME_OF_VIEW = "shell:"


@attrs.define(eq=False)
class Terminal:
    """One terminal. `run` gets the input; of a view it is the prompt at which `takers` viewers sit, or None."""

    id: str
    screen: Screen
    run: Run | None
    shell: Shell | None = None
    viewers: int = 0
    takers: int = 0

    def join(self) -> None:
        """Count one more viewer."""
        self.viewers += 1

    def leave(self) -> None:
        """Count one viewer less."""
        self.viewers -= 1

    def offer(self, prompt: Run) -> None:
        """Make `prompt` the run that gets the input."""
        self.run, self.takers = prompt, 0

    def take(self) -> Run:
        """Sit down at the prompt, and return it."""
        assert self.run is not None
        self.takers += 1
        return self.run

    def give_back(self, prompt: Run) -> bool:
        """Leave `prompt`; return whether no viewer sits at it any more. The next taker gets a new prompt."""
        if self.run is not prompt:
            return False
        self.takers -= 1
        if self.takers == 0:
            self.run = None
        return self.takers == 0


class Terminals:
    """The terminals of one session, by id; see the module's docstring."""

    def __init__(self, host: SessionServices, runs: Runs) -> None:
        self._host = host
        self._runs = runs
        self._terminals: dict[str, Terminal] = {}

    def join(self, spec: TerminalSpec) -> Viewer:
        """Return a new viewer, to be closed by the caller; make the terminal unless it is there.

        Raises:
            ShellNotFound, TerminalNotFound, Capacity.
        """
        terminal = self._find(spec)
        if terminal.viewers >= MAX_VIEWERS:
            raise Capacity("this terminal has all the viewers it may have", max_viewers=MAX_VIEWERS)
        terminal.join()
        self._host.begin_activity()
        return Viewer(self, terminal, spec)

    def _find(self, spec: TerminalSpec) -> Terminal:
        if spec.terminal_id is not None and not spec.terminal_id.startswith(_NAME_OF_VIEW):
            terminal = self._terminals.get(spec.terminal_id)
            if terminal is None:
                raise TerminalNotFound("the session has no such terminal", terminal_id=spec.terminal_id[:128])
            return terminal
        name = spec.shell
        if spec.terminal_id is not None:
            name = spec.terminal_id.removeprefix(_NAME_OF_VIEW)
        if len(self._terminals) >= MAX_TERMINALS and (name is None or _NAME_OF_VIEW + name not in self._terminals):
            raise Capacity("this session has all the terminals it may have", max_terminals=MAX_TERMINALS)
        return self._open_own(spec) if name is None else self._open_view(self._runs.shells.get(name))

    def _open_own(self, spec: TerminalSpec) -> Terminal:
        program = ExecSpec(stateless=True, terminal=spec.size, cwd=spec.cwd, env=spec.env, user=spec.user)
        screen = ProgramScreen()
        run = _run(program, screen)
        self._runs.admit(RunClaim(run))
        return self._begin(run, screen)

    async def adopt(self, run: Run) -> None:
        """Take over a terminal of its own that outlived its daemon; its screen begins with the end of its log."""
        assert run.log is not None
        screen = ProgramScreen()
        first = max(run.log.kept.first_offset(Stream.STDOUT), run.log.stdout_bytes - SCROLLBACK_BYTES)
        tail = await run.log.read(Stream.STDOUT, first, SCROLLBACK_BYTES)
        screen.show(tail.data)
        run.observe(screen)
        self._begin(run, screen)

    def _begin(self, run: Run, screen: Screen) -> Terminal:
        terminal = self._terminals[run.exec_id] = Terminal(run.exec_id, screen, run)
        self._host.start_task(self._close_with_run, terminal, run)
        return terminal

    def _open_view(self, shell: Shell) -> Terminal:
        terminal = self._terminals.get(_NAME_OF_VIEW + shell.name)
        if terminal is None or terminal.shell is not shell:  # a shell of that name may have been closed
            screen = ShellScreen()
            terminal = Terminal(_NAME_OF_VIEW + shell.name, screen, None, shell)
            self._terminals[terminal.id] = terminal
            shell.observe(screen)
            screen.hold()
            self._host.start_task(_show_past, screen, past_of(shell, self._runs.newest_first()))
        return terminal

    async def _close_with_run(self, terminal: Terminal, run: Run) -> None:
        await run.ended.wait_done()
        terminal.screen.close()
        self._terminals.pop(terminal.id, None)

    def close_view(self, shell: Shell) -> None:
        """Close the screen of a shell that was closed."""
        terminal = self._terminals.get(_NAME_OF_VIEW + shell.name)
        if terminal is not None and terminal.shell is shell:
            terminal.screen.close()

    def close(self) -> None:
        """Close all screens: the session has ended."""
        for terminal in self._terminals.values():
            terminal.screen.close()
        self._terminals.clear()

    # What viewers do --------------------------------------------------------------------------------------------

    def leave(self, terminal: Terminal, prompt: Run | None) -> None:
        """Let a viewer go. The last viewer of a view closes it; the last taker gives the shell back."""
        terminal.leave()
        self._host.end_activity()
        if prompt is not None:
            self.give_back(terminal, prompt)
        if terminal.viewers == 0 and terminal.shell is not None:
            if self._terminals.get(terminal.id) is terminal:
                del self._terminals[terminal.id]
            terminal.shell.unobserve(terminal.screen)

    async def wake(self) -> None:
        """Resume a paused session. Raises `SessionPaused` if the session does not resume by itself."""
        await self._host.wake()

    def take_over(self, terminal: Terminal, size: TerminalSize) -> Run:
        """Sit down at the watched shell's prompt; queue one unless there is one. Raises `ShellBusy`."""
        assert terminal.shell is not None
        if terminal.run is None or terminal.run.has_ended:
            run = _run(ExecSpec(command="", shell=terminal.shell.name, terminal=size))
            self._runs.admit(RunClaim(run))
            terminal.offer(run)
        return terminal.take()

    def give_back(self, terminal: Terminal, prompt: Run) -> Run | None:
        """Leave a prompt. Without takers the prompt and its processes are ended; return the prompt then."""
        if not terminal.give_back(prompt):
            return None
        prompt.cancel()
        return prompt

    async def resize(self, run: Run, size: TerminalSize) -> None:
        await self._runs.resize(run, size)

    @property
    def cwd(self) -> str:
        return self._host.cwd

    @property
    def cause_of_end(self) -> Cause:
        """The cause of the end of a view: its sandbox died, or its shell was closed."""
        return Cause.SANDBOX_DIED if self._host.has_died.is_set() else Cause.CANCELLED


class Viewer:
    """One viewer of a terminal; implements `supervisor.TerminalViewer`."""

    def __init__(self, terminals: Terminals, terminal: Terminal, spec: TerminalSpec) -> None:
        self._terminals = terminals
        self._terminal = terminal
        self._spec = spec
        self._prompt: Run | None = None
        """The prompt at which the viewer sits, in a shell that it took over."""
        self._is_closed = False
        self._reader: ScreenReader = terminal.screen.reader()

    @property
    def terminal_id(self) -> str:
        return self._terminal.id

    @property
    def info(self) -> ExecInfo:
        terminal = self._terminal
        if terminal.run is not None:
            return terminal.run.info
        run = _run(ExecSpec(command="", shell=terminal.shell.name if terminal.shell else "", terminal=self._spec.size))
        return attrs.evolve(run.info, exec_id=terminal.id)

    @property
    def skipped_bytes(self) -> int:
        return self._reader.skipped_bytes

    @property
    def is_taken_over(self) -> bool:
        if self._terminal.shell is None:
            return not self._spec.read_only
        prompt = self._prompt
        return prompt is not None and prompt.has_begun and not prompt.has_ended

    def __aiter__(self) -> ScreenReader:
        return self._reader

    async def wait_started(self) -> None:
        """Wait until the program of a terminal of its own runs. Raises the error of a program that can't start."""
        if self._terminal.shell is None and self._terminal.run is not None:
            await self._terminal.run.started.wait()
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        """See `supervisor.TerminalViewer`."""
        run = self._writable()
        try:
            await run.input.send(data)
        except ExecEnded:
            if self._terminal.shell is None:
                raise
            raise _only_watched() from None

    async def resize(self, size: TerminalSize) -> None:
        """See `supervisor.TerminalViewer`."""
        run = self._writable()
        await self._terminals.wake()
        await self._terminals.resize(run, size)

    async def take_over(self) -> None:
        """See `supervisor.TerminalViewer`."""
        self._require_writing()
        if self._terminal.shell is not None:
            await self._terminals.wake()
            if self._prompt is None or self._prompt.has_ended:
                self._prompt = self._terminals.take_over(self._terminal, self._spec.size)
            await self._wait_turn(self._prompt)
        await trio.lowlevel.checkpoint()

    async def _wait_turn(self, prompt: Run) -> None:
        """Wait for the prompt to begin; a viewer that stops waiting leaves the prompt."""
        try:
            await prompt.started.wait()
            if prompt.has_ended:
                raise ExecEnded("the prompt has ended", terminal_id=self._terminal.id)
        except BaseException:
            self._leave_prompt()
            raise

    async def give_back(self) -> None:
        """See `supervisor.TerminalViewer`."""
        if (prompt := self._leave_prompt()) is not None:
            await prompt.ended.wait_done()
        await trio.lowlevel.checkpoint()

    def _leave_prompt(self) -> Run | None:
        """Leave the prompt; return it if it is ended by that."""
        prompt, self._prompt = self._prompt, None
        return None if prompt is None else self._terminals.give_back(self._terminal, prompt)

    async def wait_end(self) -> ExecEnd:
        """See `supervisor.TerminalViewer`."""
        if self._terminal.shell is None and self._terminal.run is not None:
            return await self._terminal.run.ended.wait()
        while not self._terminal.screen.is_closed:
            await self._terminal.screen.wait_change()
        ghost = _run(ExecSpec(command="", exec_id=self._terminal.id))
        return cut_short(ghost, self._terminals.cause_of_end, self._terminals.cwd)

    def close_unused(self) -> None:
        """Leave, because the asker was cancelled."""
        self.close()

    def close(self) -> None:
        """Leave; never blocks, never raises."""
        if not self._is_closed:
            self._is_closed = True
            self._reader.close()
            self._terminals.leave(self._terminal, self._prompt)

    def _writable(self) -> Run:
        self._require_writing()
        is_watched = self._terminal.shell is not None
        run = self._prompt if is_watched else self._terminal.run
        if is_watched and (run is None or run.has_ended):
            raise _only_watched()
        if run is None or run.has_ended:
            raise ExecEnded("the terminal has ended", terminal_id=self._terminal.id)
        return run

    def _require_writing(self) -> None:
        if self._spec.read_only:
            raise PermissionDenied("this viewer may only watch")


async def _show_past(screen: ShellScreen, past: Sequence[PastRun]) -> None:
    """Put the past of a shell onto its new screen, before the bytes that the screen keeps back meanwhile."""
    try:
        for each in past:
            screen.show_past(each.run, await each.read(), is_over=each.is_over)
    finally:
        screen.release()


def _only_watched() -> PermissionDenied:
    return PermissionDenied("the shell is only watched; take it over first")


def _run(spec: ExecSpec, *observers: RunObserver) -> Run:
    request = RunRequest(
        spec, timeout_ms=None, kind=ExecKind.TERMINAL, on_disconnect=OnDisconnect.DETACH, interactive=True
    )
    return Run(request, *observers)
