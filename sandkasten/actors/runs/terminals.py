"""The terminals of one session: shells of their own on a terminal, and views onto its persistent shells.

A terminal of its own is a run. A view shows what a persistent shell runs; who takes it over queues a run of its own in
that shell, a prompt, so that the shell's accounting stays what it is: commands wait behind it like behind any other.

What was in a persistent shell before somebody watched it: its last commands and what is kept of their output.

Taken from the logs of its runs when a view is opened, so a shell that nobody watches costs nothing. What is taken ends
exactly where a screen that follows the running command goes on. Nothing here is shown to anybody: see `screen.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from sandkasten.actors.runs.accounting import cut_short
from sandkasten.actors.runs.run import Hold, Run
from sandkasten.actors.runs.screen import SCROLLBACK_BYTES, Screen, ScreenReader
from sandkasten.actors.runs.shells import Shell
from sandkasten.model import (
    Cause,
    ExecEnd,
    ExecInfo,
    ExecKind,
    ExecSpec,
    OnDisconnect,
    Stream,
    TerminalSize,
    TerminalSpec,
)
from sandkasten.model.errors import Capacity, ExecEnded, ExecGone, PermissionDenied, TerminalNotFound

if TYPE_CHECKING:
    from sandkasten.actors.runs.runs import Host, Runs
    from sandkasten.actors.runs.shells import Shell

MAX_PAST_RUNS = 100
_LINE_BYTES = 64
"""What a command is counted with beside its text and its output."""


@attrs.frozen
class PastRun:
    """A run and the part of its output that is to be shown, by offset over both streams. `is_over`: it has ended."""

    run: Run
    start: int
    end: int
    is_over: bool

    async def read(self) -> bytes:
        """Return that part, from a whole line on if it is not all; nothing if it is not kept any more."""
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
    """Return what was run in a shell so far, the oldest first: no more than a screen keeps."""
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
        room_bytes -= end - start + len(run.command) + _LINE_BYTES
    return found[::-1]


def _was_in(shell: Shell, run: Run) -> bool:
    """Whether a run has begun in it; one that an earlier daemon saw end is known by the shell's name alone."""
    if run.is_program or run.info.started_at is None:
        return False
    return run.shell is shell or (run.shell is None and run.spec.shell == shell.name)


MAX_TERMINALS = 16
MAX_VIEWERS = 64
_NAME_OF_VIEW = "shell:"


@attrs.define(eq=False)
class Terminal:
    """One terminal: `run` is what types are sent to, for a view the prompt that `takers` viewers sit at, or None."""

    id: str
    screen: Screen
    run: Run | None
    shell: Shell | None = None
    viewers: int = 0
    takers: int = 0


class Terminals:
    """See the module's docstring."""

    def __init__(self, host: Host, runs: Runs) -> None:
        self._host = host
        self._runs = runs
        self._terminals: dict[str, Terminal] = {}

    def join(self, spec: TerminalSpec) -> Viewer:
        """Return a new viewer's handle, which must be closed; makes the terminal unless it is there.

        Raises:
            ShellNotFound, TerminalNotFound, Capacity.
        """
        terminal = self._find(spec)
        if terminal.viewers >= MAX_VIEWERS:
            raise Capacity("this terminal has all the viewers it may have", max_viewers=MAX_VIEWERS)
        terminal.viewers += 1
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
        run = _run(program)
        self._runs.admit(Hold(run))
        return self._begin(run, Screen())

    async def adopt(self, run: Run) -> None:
        """Take over a terminal of its own that outlived its daemon; its screen begins with what is kept of its end."""
        assert run.log is not None
        screen = Screen()
        first = max(run.log.kept.first_offset(Stream.STDOUT), run.log.stdout_bytes - SCROLLBACK_BYTES)
        tail = await run.log.read(Stream.STDOUT, first, SCROLLBACK_BYTES)
        screen.show(tail.data)
        self._begin(run, screen)

    def _begin(self, run: Run, screen: Screen) -> Terminal:
        run.on_output = lambda piece: screen.show(piece.data)
        run.wait_room = screen.room
        terminal = self._terminals[run.exec_id] = Terminal(run.exec_id, screen, run)
        self._host.start_task(self._close_with_run, terminal, run)
        return terminal

    def _open_view(self, shell: Shell) -> Terminal:
        terminal = self._terminals.get(_NAME_OF_VIEW + shell.name)
        if terminal is None or terminal.shell is not shell:  # one of that name may have been closed
            shell.screen = Screen()
            terminal = Terminal(_NAME_OF_VIEW + shell.name, shell.screen, None, shell)
            self._terminals[terminal.id] = terminal
            for run in shell.runs[:1]:
                if run.began_at is not None:
                    shell.screen.follow(run)
            shell.screen.hold()
            self._host.start_task(_show_past, shell.screen, past_of(shell, self._runs.newest_first()))
        return terminal

    async def _close_with_run(self, terminal: Terminal, run: Run) -> None:
        await run.ended.wait_done()
        terminal.screen.close()
        self._terminals.pop(terminal.id, None)

    def close(self) -> None:
        """The session has ended: nothing more comes to any screen."""
        for terminal in self._terminals.values():
            terminal.screen.close()
        self._terminals.clear()

    # What viewers do --------------------------------------------------------------------------------------------

    def leave(self, terminal: Terminal, prompt: Run | None) -> None:
        """A viewer goes. The last one of a view closes it, the last taker gives the shell back."""
        terminal.viewers -= 1
        self._host.end_activity()
        if prompt is not None:
            self.give_back(terminal, prompt)
        if terminal.viewers == 0 and terminal.shell is not None:
            if self._terminals.get(terminal.id) is terminal:
                del self._terminals[terminal.id]
            for run in terminal.shell.runs:
                run.on_output = None
            terminal.shell.screen = None

    async def wake(self) -> None:
        """Make a paused session go on, if it may. Raises `SessionPaused`."""
        await self._host.wake()

    def take_over(self, terminal: Terminal, size: TerminalSize) -> Run:
        """Sit down at the watched shell's prompt; queue one unless there is one. Raises `ShellBusy`."""
        assert terminal.shell is not None
        if terminal.run is None or terminal.run.has_ended:
            run = _run(ExecSpec(command="", shell=terminal.shell.name, terminal=size))
            self._runs.admit(Hold(run))
            terminal.run, terminal.takers = run, 0
        terminal.takers += 1
        return terminal.run

    def give_back(self, terminal: Terminal, prompt: Run) -> Run | None:
        """One taker less of a prompt. Without any it is ended, with what runs there, and returned."""
        if terminal.run is not prompt:
            return None
        terminal.takers -= 1
        if terminal.takers:
            return None
        terminal.run = None  # who comes now waits for a prompt of their own
        prompt.cancel()
        return prompt

    async def resize(self, run: Run, size: TerminalSize) -> None:
        await self._runs.resize(run, size)

    @property
    def cwd(self) -> str:
        return self._host.cwd

    @property
    def cause_of_end(self) -> Cause:
        """Why a view ends: its sandbox died, or its shell was closed."""
        return Cause.SANDBOX_DIED if self._host.has_died.is_set() else Cause.CANCELLED


class Viewer:
    """One viewer of a terminal; implements `supervisor.TerminalViewer`."""

    def __init__(self, terminals: Terminals, terminal: Terminal, spec: TerminalSpec) -> None:
        self._terminals = terminals
        self._terminal = terminal
        self._spec = spec
        self._prompt: Run | None = None
        """Where it sits, of a shell that it took over."""
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
        return prompt is not None and prompt.began_at is not None and not prompt.has_ended

    def __aiter__(self) -> ScreenReader:
        return self._reader

    async def wait_started(self) -> None:
        """Wait until the program of a terminal of its own runs. Raises why it never will."""
        if self._terminal.shell is None and self._terminal.run is not None:
            await self._terminal.run.started.wait()
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        """See `supervisor.TerminalViewer`."""
        run = self._writable()
        try:
            await run.send_stdin(data)
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
        """Wait for the prompt; whoever gives up waiting has left it."""
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
        """Return the prompt that is ended by it."""
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
        """Leave, for an asker who did not wait for the answer."""
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


async def _show_past(screen: Screen, past: Sequence[PastRun]) -> None:
    """Put what was in the shell before onto its new screen; what happens in it meanwhile comes behind that."""
    try:
        for each in past:
            screen.show_past(each.run, await each.read(), is_over=each.is_over)
    finally:
        screen.release()


def _only_watched() -> PermissionDenied:
    return PermissionDenied("the shell is only watched; take it over first")


def _run(spec: ExecSpec) -> Run:
    return Run(spec, timeout_ms=None, kind=ExecKind.TERMINAL, on_disconnect=OnDisconnect.DETACH, interactive=True)
