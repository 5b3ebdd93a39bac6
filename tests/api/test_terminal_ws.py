"""A terminal over a WebSocket: bytes both ways, sizes, ends, and a window that a slow screen keeps."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from runner.wire.protocol import TerminalSize
from sandkasten import model
from sandkasten.actors.runs.terminals import Viewer
from sandkasten.api.websocket.terminal import MAX_TYPED_BYTES
from sandkasten.model import Stream
from tests.api.harness import running_front
from tests.api.terminal_screen import screen, terminal
from tests.api.ws_client import client_frame, close_code, handshake, make_session, talk
from tests.fakes.runner import Script
from tests.waiting import patience, until


async def test_a_terminal_opens_with_its_size() -> None:
    """`ready` has its id; what is typed reaches a shell of its own."""
    async with running_front() as running, screen(running, query="?cols=100&rows=30") as view:
        ready = dict(view.ready)
        assert ready.pop("terminal_id") == terminal(running).exec_id
        assert ready == {"type": "ready", "cols": 100, "rows": 30, "taken_over": True, "read_only": False}


async def test_bytes_go_both_ways_unchanged() -> None:
    """Escape sequences, invalid UTF-8, NUL: a terminal's business, not ours."""
    data = b"\x1b[31mred\x00\xff\r\n"
    async with running_front() as running, screen(running) as view:
        await view.type(data)
        assert await view.see(len(data)) == data


async def test_the_end_of_a_terminal_is_told_and_closes() -> None:
    """`exit` has the fields of every ending, behind the last output; then 1000."""
    async with running_front() as running, screen(running) as view:
        run = terminal(running)
        run.write(Stream.STDOUT, b"logout")
        run.finish(cause="exited", exit_code=7)
        assert await view.see(6) == b"logout"
        end = await view.hear()
        assert isinstance(end, dict)
        assert (end["type"], end["exit_code"], end["cause"], end["exec_id"]) == ("exit", 7, "exited", run.exec_id)
        assert (await view.talk.hear_close())[0] == 1000


async def test_a_terminal_is_resized_for_all_its_viewers() -> None:
    """The size a viewer brings along when it joins changes nothing."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with screen(running, session_id) as first:
            run = terminal(running)
            await first.talk.say("resize", cols=120, rows=50)

            async def is_resized() -> bool:
                return run.sizes[-1] == TerminalSize(120, 50)

            await until(is_resized)
            async with screen(running, session_id, f"?terminal_id={run.exec_id}&cols=10&rows=10") as second:
                assert (second.ready["cols"], second.ready["rows"]) == (120, 50)
                await second.type(b"hi")
                assert await second.see(2) == await first.see(2) == b"hi"


async def test_input_waits_for_the_size_that_was_sent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads a line sees the size that the screen had when the line was typed."""
    may_resize = trio.Event()
    resize = Viewer.resize

    async def resize_later(viewer: Viewer, size: model.TerminalSize) -> None:
        await may_resize.wait()
        await resize(viewer, size)

    monkeypatch.setattr(Viewer, "resize", resize_later)
    async with running_front() as running, screen(running) as view:
        await view.talk.say("resize", cols=120, rows=50)
        await view.type(b"late")
        assert await view.is_quiet()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert terminal(running).stdin == b""
        may_resize.set()
        assert await view.see(4) == b"late"
        assert terminal(running).sizes[-1] == TerminalSize(120, 50)


async def test_a_new_viewer_sees_what_was_before() -> None:
    """The past that is kept comes first."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with screen(running, session_id) as first:
            await first.type(b"past")
            await first.see(4)
            async with screen(running, session_id, f"?terminal_id={first.ready['terminal_id']}") as second:
                assert await second.see(4) == b"past"


async def test_a_read_only_viewer_only_looks() -> None:
    """Keys and sizes of a read-only viewer are refused, with one refusal for any number of keys."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with (
            screen(running, session_id) as owner,
            screen(running, session_id, f"?terminal_id={owner.ready['terminal_id']}&read_only=true") as view,
        ):
            assert view.ready["read_only"] is True
            for _ in range(3):
                await view.type(b"rm -rf /\n")
            error = await view.hear()
            assert isinstance(error, dict)
            assert (error["error_code"], error["refused"]) == ("PERMISSION_DENIED", "input")
            assert await view.is_quiet()
            for kind, fields in (("resize", {"cols": 1, "rows": 1}), ("take_over", {})):
                await view.talk.say(kind, **fields)
                error = await view.hear()
                assert isinstance(error, dict)
                assert (error["error_code"], error["refused"]) == ("PERMISSION_DENIED", kind)
            assert terminal(running).stdin == b""


async def test_a_viewer_that_was_too_slow_is_told_what_it_missed() -> None:
    """In bytes, before what comes next."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with (
            screen(running, session_id) as fast,
            screen(running, session_id, f"?terminal_id={fast.ready['terminal_id']}&window=65536") as view,
        ):
            run = terminal(running)
            run.write(Stream.STDOUT, bytes(65_536))
            await view.see(65_536)
            run.write(Stream.STDOUT, bytes(20 * 65_536))
            await fast.see(21 * 65_536)
            await view.talk.say("credit", bytes=65_536)
            seen, skipped = 0, 0
            while not skipped:
                message = await view.hear()
                if isinstance(message, bytes):
                    seen += len(message)
                    await view.talk.say("credit", bytes=len(message))
                else:
                    assert message["type"] == "skipped"
                    skipped = message["bytes"]
        assert skipped > 0
        assert seen + skipped <= 20 * 65_536


async def test_the_window_bounds_what_is_on_its_way() -> None:
    """A screen acknowledges what it has drawn; not a byte more comes. Credit beyond the window is not saved up."""
    async with running_front() as running, screen(running, query="?window=50000") as view:
        await view.talk.say("credit", bytes=16 * 1024 * 1024)
        assert await view.is_quiet()
        terminal(running).write(Stream.STDOUT, bytes(120_000))
        await view.see(50_000)
        assert await view.is_quiet()
        await view.talk.say("credit", bytes=1_000)
        await view.see(1_000)
        assert await view.is_quiet()
        await view.talk.say("credit", bytes=50_000)
        await view.see(50_000)


async def test_without_a_window_everything_comes() -> None:
    """A simple client needs no bookkeeping; frames are of at most 32 KiB."""
    async with running_front() as running, screen(running) as view:
        terminal(running).write(Stream.STDOUT, bytes(3_000_000))
        sizes: list[int] = []
        while sum(sizes) < 3_000_000:
            message = await view.hear()
            assert isinstance(message, bytes)
            sizes.append(len(message))
        assert max(sizes) == 32 * 1024


async def test_a_program_that_does_not_read_holds_nothing_up() -> None:
    """Sizes and pings are heard; what is typed waits, and too much of it closes."""
    async with running_front() as running:
        running.tree.scripts[""] = Script(echo=True, reads=trio.Event())
        async with screen(running) as view:
            await view.type(bytes(MAX_TYPED_BYTES // 2))
            assert await view.is_quiet()
            await view.talk.say("resize", cols=33, rows=44)

            async def is_resized() -> bool:
                return terminal(running).sizes[-1] == TerminalSize(33, 44)

            await until(is_resized)
            for _ in range(3):
                await view.type(bytes(MAX_TYPED_BYTES // 2))
            assert (await view.talk.hear_close())[0] == 4429


@pytest.mark.parametrize(
    ("query", "code", "error_code"),
    [
        ("?cols=0", 4400, "INVALID_REQUEST"),
        ("?cols=1001", 4400, "INVALID_REQUEST"),
        ("?rows=ten", 4400, "INVALID_REQUEST"),
        ("?read_only=yes", 4400, "INVALID_REQUEST"),
        ("?window=1", 4400, "INVALID_REQUEST"),
        ("?shell=a%20b", 4400, "INVALID_REQUEST"),
        ("?terminal_id=", 4400, "INVALID_REQUEST"),
        ("?terminal_id=shell:default&shell=default", 4400, "INVALID_REQUEST"),
        ("?terminal_id=shell:default&cwd=/tmp", 4400, "INVALID_REQUEST"),
        ("?shell=default&cwd=/tmp", 4400, "INVALID_REQUEST"),
        ("?shell=default&user=root", 4400, "INVALID_REQUEST"),
        ("?cols=%ff", 4400, "INVALID_REQUEST"),
        ("?terminal_id=none", 4404, "TERMINAL_NOT_FOUND"),
        ("?shell=none", 4404, "SHELL_NOT_FOUND"),
    ],
)
async def test_a_terminal_that_cannot_be_opened_is_refused(query: str, code: int, error_code: str) -> None:
    """With an error that says why, and the code of the same refusal."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with talk(running, f"/v1/sessions/{session_id}/terminal/ws{query}") as client:
            error = await client.hear_text("error")
            assert error["error_code"] == error_code
            assert (await client.hear_close())[0] == code


@pytest.mark.parametrize("message", ["", "{", "[]", '{"type":"none"}', '{"type":7}'])
async def test_a_message_that_cannot_be_read_closes(message: str) -> None:
    """4400 with a reason."""
    async with running_front() as running, screen(running) as view:
        await view.talk.connection.send_message(message)
        code, reason = await view.talk.hear_close()
        assert code == 4400
        assert reason


@pytest.mark.parametrize(
    ("kind", "fields"), [("resize", {"cols": 0, "rows": 1}), ("resize", {}), ("credit", {"bytes": "1"})]
)
async def test_a_malformed_message_of_a_known_type_is_refused(kind: str, fields: dict[str, object]) -> None:
    """The terminal goes on."""
    async with running_front() as running, screen(running) as view:
        await view.talk.say(kind, **fields)
        error = await view.hear()
        assert isinstance(error, dict)
        assert (error["error_code"], error["refused"]) == ("INVALID_REQUEST", kind)
        assert await view.is_quiet()


async def test_the_terminal_stays_when_its_viewer_leaves() -> None:
    """A viewer that comes back finds the terminal as it was."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with screen(running, session_id) as view:
            terminal_id = view.ready["terminal_id"]
        run = terminal(running)
        async with screen(running, session_id, f"?terminal_id={terminal_id}"):
            assert not run.cancelled.is_set()
            assert run.reply is None


async def test_a_screen_that_asks_and_does_not_listen_is_told_to_leave() -> None:
    """Answers that nobody reads are bounded here, too."""
    async with running_front() as running, await running.connect(receive_buffer=4096) as stream:
        running.tree.scripts[""] = Script(echo=True)
        await stream.send_all(handshake(f"/v1/sessions/{await make_session(running)}/terminal/ws"))
        ping = client_frame(1, json.dumps({"type": "ping", "data": "x" * 256}).encode())
        with trio.fail_after(patience()):
            await stream.send_all(ping * 40_000)
        assert await close_code(stream) == 4429
