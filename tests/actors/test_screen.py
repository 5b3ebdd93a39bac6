"""Screens of shells: a viewer sees the past first, though the present goes on while the past is read."""

from __future__ import annotations

from sandkasten.actors.runs.run import Run, RunRequest
from sandkasten.actors.runs.terminals import SCROLLBACK_BYTES, Screen, ShellScreen
from sandkasten.model import Cause, ExecEnd, ExecSpec, Output, Stream, Usage

COMMAND = b"\x1b[2m$ make\x1b[0m\r\n"


def a_run() -> Run:
    return Run(RunRequest(ExecSpec("make"), timeout_ms=1000))


def seen(screen: Screen) -> bytes:
    text, offset = b"", screen.first_offset
    while piece := screen.piece_at(offset):
        text, offset = text + piece, offset + len(piece)
    return text


async def test_what_comes_while_the_past_is_read_is_shown_behind_it() -> None:
    """A command that goes on, ends and is followed by another one."""
    screen, run, next_run = ShellScreen(), a_run(), a_run()
    run.begin(0)
    run.observe(screen)
    screen.hold()
    screen.wrote(run, Output(Stream.STDOUT, b"b\nc", 2))
    run.finish(ExecEnd(run.exec_id, 1, None, Cause.EXITED, "/", 1, 1, shell_restarted=False, usage=Usage()))
    next_run.observe(screen)
    next_run.begin(0)
    assert seen(screen) == b""
    screen.show_past(run, b"a\n", is_over=False)
    screen.release()
    assert seen(screen) == COMMAND + b"a\r\nb\r\nc\r\n\x1b[2m[exited: 1]\x1b[0m\r\n" + COMMAND


async def test_a_flood_while_the_past_is_read_takes_bounded_memory() -> None:
    """The newest part of the flood is kept, as on the screen itself; the past gives way to the flood."""
    screen, run = ShellScreen(), a_run()
    screen.hold()
    for number in range(100):
        screen.wrote(run, Output(Stream.STDOUT, b"%05d" % number * 10_000, number))
    assert screen._held_bytes <= SCROLLBACK_BYTES + 50_000
    screen.show_past(run, b"old\n", is_over=False)
    screen.release()
    assert seen(screen).endswith(b"00099" * 10_000)
    assert len(seen(screen)) <= SCROLLBACK_BYTES + 50_000


async def test_a_screen_that_closes_early_shows_what_waited() -> None:
    """The end of a session does not wait for the past."""
    screen, run = ShellScreen(), a_run()
    screen.hold()
    screen.began(run)
    screen.close()
    assert seen(screen) == COMMAND
    reader = screen.reader()
    assert [piece async for piece in reader] == [COMMAND]
    reader.close()
