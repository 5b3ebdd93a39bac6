"""The standard streams of one command as pipes: two for its output, one for its input when it has one.

It must not know when a command ends or who listens. A terminal in their place: `terminal`.

Sources: `runner.shell.command_driver` says which name the shell opens as what.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from runner.loop.loop import Loop
from runner.loop.private import remove_private
from runner.streams.pipes import Leftovers, OutputPipe
from runner.streams.stdin import StdinPipe
from runner.wire.protocol import Kind, TerminalSize

OnOutput = Callable[[Kind, bytes], None]


class Streams(Protocol):
    """What a command's bytes go through, whatever it is."""

    def open(self, *, needs_input_file: bool) -> None:
        """Make what the shell opens; again after `close`, for another shell. May raise OSError.

        `needs_input_file`: it opens `in`, even if the command has no standard input.
        """

    @property
    def is_begun(self) -> bool:
        """Whether the shell has begun the command: it opens the streams before it runs anything."""

    def on_reader(self) -> None:
        """The command holds its standard input now."""

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def pause(self) -> None:
        """Read no output; writers block when there is no room."""

    def resume(self) -> None: ...

    def stop_input(self) -> None:
        """The command has ended: nothing more is its input."""

    def finish(self, *, may_read: bool) -> None:
        """The command has ended: what was written by now is its last output, `on_done` follows after it."""

    def close(self) -> None:
        """Give everything up; what somebody still writes is thrown away."""

    def resize(self, size: TerminalSize) -> bool: ...

    @property
    def is_done(self) -> bool:
        """Whether the last output was read."""

    @property
    def buffered_bytes(self) -> int:
        """Input not yet taken by the command."""


class PipeStreams:
    """FIFOs `out` and `err`, and for `in` a FIFO or /dev/null."""

    def __init__(
        self,
        loop: Loop,
        file: Callable[[str], str],
        leftovers: Leftovers,
        *,
        stdin: StdinPipe | None,
        on_output: OnOutput,
        on_done: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._file = file
        self._leftovers = leftovers
        self._stdin = stdin
        self._has_input_file = False
        self._on_output = on_output
        self._on_done = on_done
        self._pipes: tuple[OutputPipe, ...] = ()

    def open(self, *, needs_input_file: bool) -> None:
        self._has_input_file = needs_input_file
        if self._stdin is not None:
            self._stdin.open(self._file("in"))
        elif needs_input_file:
            os.symlink("/dev/null", self._file("in"))
        self._pipes = (self._pipe("out", Kind.STDOUT), self._pipe("err", Kind.STDERR))

    def _pipe(self, name: str, kind: Kind) -> OutputPipe:
        return OutputPipe(self._loop, self._file(name), lambda chunk: self._on_output(kind, chunk), self._on_done)

    @property
    def is_begun(self) -> bool:
        return any(pipe.was_opened() for pipe in self._pipes)

    def on_reader(self) -> None:
        if self._stdin is not None:
            self._stdin.on_reader()

    def feed(self, data: bytes) -> None:
        if self._stdin is not None:
            self._stdin.feed(data)

    def end(self) -> None:
        if self._stdin is not None:
            self._stdin.end()

    def pause(self) -> None:
        for pipe in self._pipes:
            pipe.pause()

    def resume(self) -> None:
        for pipe in self._pipes:
            pipe.resume()

    def stop_input(self) -> None:
        if self._stdin is not None:
            self._stdin.close()
        if self._has_input_file:
            remove_private(self._file("in"))

    def finish(self, *, may_read: bool) -> None:
        for pipe in self._pipes:
            pipe.finish(may_read=may_read)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close(self._leftovers)
        self._pipes = ()

    def resize(self, size: TerminalSize) -> bool:
        return False

    @property
    def is_done(self) -> bool:
        return all(pipe.is_done for pipe in self._pipes)

    @property
    def buffered_bytes(self) -> int:
        return self._stdin.buffered_bytes if self._stdin is not None else 0


class NoStreams:
    """What a command has whose reply is out: nothing, so that nothing refers back to it."""

    is_begun = True
    is_done = True
    buffered_bytes = 0

    def open(self, *, needs_input_file: bool) -> None: ...

    def on_reader(self) -> None: ...

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stop_input(self) -> None: ...

    def finish(self, *, may_read: bool) -> None: ...

    def close(self) -> None: ...

    def resize(self, size: TerminalSize) -> bool:
        return False


NO_STREAMS = NoStreams()
