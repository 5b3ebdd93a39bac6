"""Servers and proxies that answer badly, late or not at all, and callers that give up at any moment."""

from __future__ import annotations

import asyncio
import base64
import functools
import gc
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import anyio
import pytest
import trio
from wsproto.utilities import generate_accept_token

from sandkasten import errors
from sandkasten.model import Stream
from sandkasten.sdk import SandboxClient, Session, transport, waiting
from sandkasten.sdk import client as client_module
from sandkasten.sdk import files as files_module
from sandkasten.sdk import run as run_module
from tests.api.harness import KEY, RunningTree, running_front
from tests.fakes.runner import Script
from tests.sdk.proxy import Cut, running_proxy
from tests.sdk.twin import FLAVOURS
from tests.waiting import patience, until

SESSION = "0123456789abcdef"
TURNS = 7
"""Turns of asyncio's loop between two moments at which callers give up; fewer in `test_every_byte`."""


@asynccontextmanager
async def answering(
    answers: Sequence[bytes | None], heads: list[bytes] | None = None
) -> AsyncIterator[tuple[str, list[float]]]:
    """Serve these answers, one to each request, the last one for ever; None is silence. Yield the URL and the times.

    In an answer to a WebSocket's handshake `ACCEPT-KEY` stands for what accepts its key (RFC 6455 §4.2.2). `heads` gets
    what began each request.
    """
    times: list[float] = []

    async def serve(stream: trio.SocketStream) -> None:
        try:
            while head := await stream.receive_some(64 * 1024):
                length = re.search(rb"content-length: (\d+)", head.lower())
                left = int(length[1]) - len(head.partition(b"\r\n\r\n")[2]) if length else 0
                while left > 0:
                    left -= len(await stream.receive_some(64 * 1024))
                answer = answers[min(len(times), len(answers) - 1)]
                times.append(time.monotonic())
                if heads is not None:
                    heads.append(head)
                if answer is None:
                    await trio.sleep_forever()
                else:
                    key = re.search(rb"sec-websocket-key: (\S+)", head, re.IGNORECASE)
                    await stream.send_all(answer.replace(b"ACCEPT-KEY", generate_accept_token(key[1]) if key else b""))
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}", times
        nursery.cancel_scope.cancel()


def answer(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def refusal(status: int, code: str, *headers: str, retryable: bool = True) -> bytes:
    body = {"error_code": code, "message": "no", "retryable": retryable, "request_id": "r"}
    return answer(status, json.dumps(body).encode(), *headers)


DONE = answer(200, b'{"exit_code":0,"cwd":"/","output":"done","truncated":false,"duration_ms":1}')
MADE = answer(201, json.dumps({"id": SESSION}).encode())
STREAM = answer(
    200, b'event: done\ndata: {"exit_code":0,"cwd":"/","duration_ms":1}\n\n', "Content-Type: text/event-stream"
)
WRITTEN = answer(200, b'{"path":"/workspace/f","etag":"e","size":1}')
PAGE = answer(502, b"<html>bad gateway</html>", "Content-Type: text/html")


async def test_input_is_waited_for_as_long_as_the_program_reads_none() -> None:
    """The client's timeout is no time limit of the program."""
    async with answering([None]) as (url, _), SandboxClient(base_url=url, timeout=0.1) as client:
        with trio.move_on_after(1) as scope:
            await Session(client, SESSION).run("late").send("x")
        assert scope.cancelled_caught


@pytest.mark.parametrize("said", [refusal(409, "EXEC_ENDED"), refusal(429, "QUOTA_EXCEEDED")])
async def test_input_that_is_refused_on_the_way_says_how_much_was_taken(said: bytes) -> None:
    """By the parts that were acknowledged, so that nobody sends these twice."""
    async with answering([answer(200, b"{}"), said]) as (url, _), SandboxClient(base_url=url) as client:
        with pytest.raises(errors.SandkastenAPIError) as raised:
            await Session(client, SESSION).run("late").send(bytes(300_000))
        assert raised.value.acknowledged == 256 * 1024


@pytest.mark.parametrize(
    "first",
    [
        refusal(503, "CAPACITY"),
        refusal(429, "QUOTA_EXCEEDED"),
        PAGE,
        answer(503, b""),
        answer(504, b"gateway timeout"),
    ],
    ids=["capacity", "quota", "bad gateway", "unavailable", "gateway timeout"],
)
@pytest.mark.parametrize("call", ["exec", "create", "stream", "write"])
async def test_a_refusal_that_may_pass_is_waited_for(call: str, first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own and a proxy's. A stream is refused as a WebSocket, then as events."""
    monkeypatch.setattr(transport, "FIRST_WAIT_S", 0.01)
    last = {"exec": DONE, "create": MADE, "stream": STREAM, "write": WRITTEN}[call]
    async with answering([first, first, last]) as (url, times), SandboxClient(base_url=url) as client:
        box = Session(client, SESSION)
        match call:
            case "exec":
                assert (await box.exec("x")).output == "done"
            case "create":
                assert (await client.create_session()).id == SESSION
            case "stream":
                assert [each.done async for each in box.exec_stream("x")] == [True]
            case "write":
                assert (await box.files.write("f", "x")).size == 1
        assert len(times) == 3


@pytest.mark.parametrize(
    ("said", "leaf"),
    [
        (refusal(503, "CAPACITY", retryable=False), errors.Capacity),
        (refusal(504, "COMMAND_TIMEOUT", retryable=False), errors.CommandTimeout),
        (refusal(404, "SESSION_NOT_FOUND", retryable=False), errors.SessionNotFound),
        (refusal(401, "UNAUTHORIZED", retryable=False), errors.Unauthorized),
        (refusal(409, "SHELL_BUSY"), errors.ShellBusy),
        (refusal(418, "NEW_CODE", retryable=False), errors.SandkastenAPIError),
        (answer(404, b"<html>"), errors.SandkastenAPIError),
        (answer(200, b"<html>"), errors.SandkastenAPIError),
    ],
)
async def test_another_refusal_is_raised_at_once(said: bytes, leaf: type[Exception]) -> None:
    """As its leaf, or without one for what is no error of this server."""
    async with answering([said]) as (url, times), SandboxClient(base_url=url) as client:
        with pytest.raises(leaf) as raised:
            await Session(client, SESSION).exec("x")
        assert isinstance(raised.value, errors.SandkastenAPIError)
        assert len(times) == 1


DATES = ("Date: Wed, 21 Oct 2015 07:28:00 GMT", "Retry-After: Wed, 21 Oct 2015 07:28:02 GMT")
GROWING = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5)


@pytest.mark.parametrize(
    ("first", "waits"),
    [
        (PAGE, GROWING),
        (refusal(503, "CAPACITY", "Retry-After: 0"), GROWING),
        (refusal(503, "CAPACITY", "Retry-After: soon"), GROWING),
        (refusal(503, "CAPACITY", DATES[1]), GROWING),
        (refusal(503, "CAPACITY", "Retry-After: 3"), [3] * 8),
        (refusal(429, "QUOTA_EXCEEDED", "Retry-After: 3"), [3] * 8),
        (refusal(503, "CAPACITY", *DATES), [2] * 8),
    ],
    ids=["none", "zero", "no time", "no clock", "503", "429", "date"],
)
async def test_waits_are_the_servers_advice_or_grow(
    first: bytes, waits: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits that grow end at 5 s and are by chance up to a half shorter, so that clients don't come together."""
    waited: list[float] = []
    monkeypatch.setattr(waiting, "sleep", _noted(waited))
    async with answering([first] * 8 + [DONE]) as (url, times), SandboxClient(base_url=url) as client:
        assert (await Session(client, SESSION).exec("x")).ok
        assert len(times) == 9
    if waits is not GROWING:
        assert waited == waits
        return
    assert all(most / 2 <= each <= most for each, most in zip(waited, waits, strict=True)), waited
    recovery = transport.StreamRecovery(120.0)
    lost = transport.Lost("", was_sent=True)
    for most in (*GROWING, None, 0.1):
        if most is None:
            recovery.progress()
        else:
            await recovery.wait(lost)
            assert most / 2 <= waited[-1] <= most
    assert len({each / most for each, most in zip(waited, waits, strict=False)}) > 4


def _noted(waited: list[float]) -> Callable[[float], Awaitable[None]]:
    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await trio.lowlevel.checkpoint()

    return sleep


@pytest.mark.parametrize("first", [b"no HTTP at all\r\n\r\n", PAGE], ids=["lost", "bad gateway"])
@pytest.mark.parametrize("use", ["exec", "process", "create"])
async def test_what_may_have_begun_is_ended_when_its_repetitions_are_refused(use: str, first: bytes) -> None:
    """The run, or the session, of the first attempt, of whose effect nobody knows; a refusal alone has none."""
    late = refusal(503, "CAPACITY", "Retry-After: 3000")
    for begun in (True, False):
        heads: list[bytes] = []
        answers = [*([first] if begun else []), late, MADE]
        async with answering(answers, heads) as (url, _), SandboxClient(base_url=url) as client:
            box = Session(client, SESSION)
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "exec": functools.partial(box.exec, "x"),
                "process": functools.partial(box.process, "x"),
                "create": client.create_session,
            }
            with pytest.raises(errors.Capacity) as raised:
                await calls[use]()
            assert raised.value.may_have_begun == begun
        last = heads[-1].partition(b" HTTP")[0]
        if begun:
            assert last.startswith(b"DELETE ") if use == "create" else last.endswith(b"/cancel"), last
        else:
            assert len(heads) == 1


async def test_advice_beyond_the_calls_time_ends_it_at_once() -> None:
    """With the advice, which the caller may follow."""
    late = refusal(503, "CAPACITY", "Retry-After: 3000")
    async with answering([late]) as (url, times), SandboxClient(base_url=url) as client:
        with pytest.raises(errors.Capacity) as raised:
            await Session(client, SESSION).exec("x")
        assert raised.value.retry_after_s == 3000
        assert len(times) == 1


async def test_a_silent_server_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the client's timeout, also by a connection that is half open; the run is cancelled by another."""
    async with (
        answering([None, answer(200, b"{}")]) as (url, times),
        SandboxClient(base_url=url, timeout=0.2) as client,
    ):
        with trio.fail_after(patience()):
            with pytest.raises(errors.DeadlineExceeded):
                await client.node()
    assert len(times) == 1
    async with answering([None]) as (url, _), SandboxClient(base_url=url, timeout=0.2) as client:
        monkeypatch.setattr(client_module, "CANCEL_S", 0.2)
        with trio.fail_after(patience()), pytest.raises(TimeoutError):
            await client.create_session()


async def test_transfers_and_terminals_of_a_silent_server_are_given_up() -> None:
    """Within the client's timeout, if the server does not answer at all."""
    async with answering([None]) as (url, _), SandboxClient(base_url=url, timeout=0.2) as client:
        box = Session(client, SESSION)
        for use in (box.files.write("f", bytes(300_000)), box.files.read_bytes("f"), box.terminal().__aenter__()):
            with trio.fail_after(patience()), pytest.raises(errors.DeadlineExceeded):
                await use


async def test_transfers_and_terminals_over_a_connection_that_falls_silent_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload with an error in time, a download by another connection, and a terminal as lost."""
    monkeypatch.setattr(transport, "SILENCE_S", 0.3)
    async with running_front() as running, running_proxy(running.port) as proxy:
        running.tree.scripts[""] = Script(echo=True)
        async with SandboxClient(base_url=running.url, api_key=KEY) as steady:
            box = await steady.create_session()
            await box.files.write("f", bytes(1 << 20))
            await trio.sleep(0.05)  # a file that changed just now has no version to go on with
        for of_request in (True, False):
            proxy.cuts = [Cut(100_000, of_request, is_silent=True)]
            async with SandboxClient(base_url=proxy.url, api_key=KEY, timeout=0.3) as client:
                files = client.session(box.id).files
                with trio.fail_after(patience()):
                    if of_request:
                        with pytest.raises(errors.DeadlineExceeded):
                            await files.write("g", bytes(32 << 20))
                    else:
                        async with files.open("f") as stream:
                            assert sum([len(piece) async for piece in stream]) == 1 << 20
        async with SandboxClient(base_url=proxy.url, api_key=KEY, timeout=0.3) as client:
            before = proxy.answered
            async with client.session(box.id).terminal():
                opened = proxy.answered - before
            proxy.cuts = [Cut(opened, of_request=False, is_silent=True)]
            await client._transport._pool.aclose()
            with trio.fail_after(patience()), pytest.raises(errors.ConnectionFailed):
                await _type_and_read(client.session(box.id))


async def _type_and_read(box: Session) -> None:
    async with box.terminal() as viewer:
        await viewer.send("x")
        while True:
            await anext(viewer)


async def test_no_server_is_said_at_once() -> None:
    """With its address, and without repetitions, if it has never answered."""
    client = SandboxClient(base_url="http://127.0.0.1:9")
    with (
        trio.fail_after(patience()),
        pytest.raises(errors.ConnectionFailed, match=r"no server answers at http://127\.0"),
    ):
        await client.create_session()
    with pytest.raises(ValueError, match="must begin with http"):
        SandboxClient(base_url="localhost:8080")
    await client.close()


@pytest.mark.parametrize(
    "said",
    [b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", b"HTTP/1.1 101 Hm\r\n\r\n", b""],
)
async def test_bytes_that_are_no_answer_are_a_lost_connection(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call hangs never, and a port that has never answered is told soon, whatever the call's time."""
    monkeypatch.setattr(transport, "FIRST_WAIT_S", 0.01)

    async with answering([said or None]) as (url, times), SandboxClient(base_url=url, timeout=0.3) as client:
        with trio.fail_after(patience()), pytest.raises((errors.ConnectionFailed, errors.DeadlineExceeded)):
            await client.node()
        assert len(times) <= 3


async def test_a_key_is_sent_to_the_server_alone() -> None:
    """A redirect is not followed."""
    moved = answer(302, b"", "Location: http://127.0.0.1:1/")
    async with answering([moved]) as (url, times), SandboxClient(base_url=url, api_key="secret") as client:
        with pytest.raises(errors.SandkastenAPIError):
            await client.node()
        assert len(times) == 1


async def test_a_proxy_is_used_where_the_caller_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the environment names, and never for this machine itself."""
    async with answering([answer(200, b'{"status":"ok"}')]) as (proxy, _):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        for url, use_proxy, is_reached in (
            ("http://0.0.0.0:9", True, True),
            ("http://0.0.0.0:9", False, False),
            ("http://127.0.0.1:9", True, False),
        ):
            async with SandboxClient(base_url=url, use_proxy=use_proxy) as client:
                if is_reached:
                    assert await client.healthz()
                else:
                    with pytest.raises(errors.ConnectionFailed):
                        await client.healthz()


async def test_a_proxy_gets_the_name_and_password_of_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Percent signs decoded; of a request and of a tunnel, and never as a part of the address."""
    heads: list[bytes] = []
    monkeypatch.delenv("no_proxy", raising=False)
    async with answering([answer(407, b"")], heads) as (proxy, _):
        for scheme, userinfo in (("http", "me:a%40b%3A"), ("https", "me:a%40b%3A"), ("http", "me")):
            monkeypatch.setenv(f"{scheme}_proxy", proxy.replace("://", f"://{userinfo}@"))
            async with SandboxClient(base_url=f"{scheme}://0.0.0.0:9", timeout=0.2) as client:
                with pytest.raises(errors.SandkastenError):
                    await client.healthz()
    sent = [re.findall(rb"proxy-authorization: basic (\S+)", head, re.IGNORECASE) for head in heads]
    assert [[base64.b64decode(each) for each in found] for found in sent] == [[b"me:a@b:"], [b"me:a@b:"], [b"me:"]]


class _GivesUp(trio.abc.Instrument):
    """Cancels a scope when the task within has made a number of steps."""

    def __init__(self, steps: int) -> None:
        self.scope = trio.CancelScope()
        self.task = trio.lowlevel.current_task()
        self._left = steps

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self._left -= 1
            if self._left == 0:
                self.scope.cancel()


async def _execute(box: Session, _local: Path) -> None:
    await box.exec("held")


async def _stream(box: Session, _local: Path) -> None:
    async for _ in box.exec_stream("held"):
        pass


async def _start(box: Session, _local: Path) -> None:
    async with box.start("held") as run:
        await run.wait()


async def _process(box: Session, _local: Path) -> None:
    run = await box.process("held")
    try:
        await run.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await run.cancel()


async def _wait_for(box: Session, _local: Path) -> None:
    run = await box.process("held")
    try:
        await run.wait_for(pattern="nothing")
    finally:
        with anyio.CancelScope(shield=True):
            await run.cancel()


async def _create(box: Session, _local: Path) -> None:
    client = box._client
    assert isinstance(client, SandboxClient)
    async with await client.create_session() as other:
        await other.exec("held")


async def _terminal(box: Session, _local: Path) -> None:
    async with box.terminal(shell="default") as viewer:
        await viewer.take_over()
        await viewer.send("held")
        while True:
            await anext(viewer)


async def _events(box: Session, _local: Path) -> None:
    async with box.watch_events() as events:
        async for _ in events:
            pass


async def _upload(box: Session, local: Path) -> None:
    await box.files.write("up", local / "in/f")


async def _download(box: Session, local: Path) -> None:
    await box.files.copy_out("there/f", local / "f")


async def _copy_in(box: Session, local: Path) -> None:
    await box.files.copy_in(local / "in", "d")


async def _copy_out(box: Session, local: Path) -> None:
    await box.files.copy_out("there", local / "out")


HELD = (_execute, _stream, _start, _process, _wait_for, _create, _terminal, _events)
"""Uses that end when their caller gives up."""
MOVES = (_upload, _download, _copy_in, _copy_out)


@asynccontextmanager
async def _session_to_leave(local: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, str]]:
    """Serve a session with files, here in `local` and there, yield the server's URL and the session's id, and check
    that nothing is left of what was given up.
    """
    monkeypatch.setattr(run_module, "_CANCEL_WAITS_S", (0.01, 0.03, 0.1))
    (local / "in").mkdir()
    (local / "in/f").write_bytes(bytes(300_000))
    async with running_front() as running:
        running.tree.scripts["held"] = Script([(Stream.STDOUT, b"x")], hold=trio.Event())
        running.tree.scripts[""] = Script(echo=True)
        async with SandboxClient(base_url=running.url, api_key=KEY) as client:
            session = await client.create_session()
            await session.files.copy_in(local / "in", "there")
        yield running.url, session.id
        await until(lambda: _nothing_is_left(running))
        gc.collect()  # a file that was left open is a warning, and so an error
        assert {*os.listdir(local)} <= {"in", "out", "f"}


@pytest.mark.parametrize("use", [*HELD, *MOVES])
async def test_a_caller_may_give_up_at_any_moment(
    use: Callable[[Session, Path], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No run, no session and no file is left, nothing hangs, and nobody is warned."""
    async with _session_to_leave(tmp_path, monkeypatch) as (url, session):
        gave_up = ended = 0
        for steps in range(1, 400):
            async with SandboxClient(base_url=url, api_key=KEY) as client:
                await client.healthz()
                instrument = _GivesUp(steps)
                with trio.fail_after(patience(20)), instrument.scope:
                    trio.lowlevel.add_instrument(instrument)
                    try:
                        with trio.move_on_after(0.1 if use in HELD else patience(20)):
                            await use(client.session(session), tmp_path)
                    finally:
                        trio.lowlevel.remove_instrument(instrument)
                if instrument.scope.cancelled_caught:
                    gave_up += 1
                else:
                    ended += 1  # the run was waited for: further steps are of the same wait
                    break
        assert gave_up > 5
        assert ended


@pytest.mark.parametrize("use", [*HELD, *MOVES])
async def test_a_caller_on_asyncio_may_give_up_at_any_moment(
    use: Callable[[Session, Path], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on trio: after any number of turns of the loop, and while a thread opens a file."""
    opened = files_module._open

    def open_slowly(path: Path, mode: Literal["rb", "xb"]) -> BinaryIO:
        time.sleep(0.005)
        return opened(path, mode)

    monkeypatch.setattr(files_module, "_open", open_slowly)

    async def give_up_everywhere(url: str, session: str) -> int:
        gave_up = 0
        for turns in range(0, 150, TURNS):
            async with SandboxClient(base_url=url, api_key=KEY) as client:
                await client.healthz()
                task = asyncio.ensure_future(use(client.session(session), tmp_path))
                for _ in range(turns):
                    await asyncio.sleep(0.0002 if turns > 75 else 0)
                task.cancel()
                await asyncio.wait([task], timeout=patience(20))
                if task.cancelled():
                    gave_up += 1
                else:
                    task.result()
        return gave_up

    async with _session_to_leave(tmp_path, monkeypatch) as (url, session):
        gave_up = await trio.to_thread.run_sync(lambda: asyncio.run(give_up_everywhere(url, session)))
        assert gave_up == len(range(0, 150, TURNS)) if use in HELD else gave_up > 5


_PROGRAM = """
import asyncio, contextlib, sys
import anyio
from sandkasten import SandboxClient, sync

flavour, url, key, session = sys.argv[1:]

async def main():
    if flavour == "asyncio":
        asyncio.get_running_loop().slow_callback_duration = 600  # of which -X dev tells
    async with SandboxClient(base_url=url, api_key=key) as client:
        box = client.session(session)
        async with contextlib.aclosing(box.exec_stream("held")) as chunks:
            await anext(chunks)
        async with box.start("held") as run:
            await anext(run)
        with anyio.move_on_after(0.2):
            await box.exec("held")
        async with box.files.open("there/f") as stream:
            await anext(stream)
        async with box.watch_events(cursor="0") as events:
            await anext(events)
        async with box.terminal(shell="default") as viewer:
            await viewer.take_over()

def block():
    with sync.SandboxClient(base_url=url, api_key=key) as client:
        box = client.session(session)
        for _ in box.exec_stream("held"):
            break
        with box.start("held") as run:
            next(run)
        with box.files.open("there/f") as stream:
            next(stream)
        with box.watch_events(cursor="0") as events:
            next(events)
        with box.terminal(shell="default") as viewer:
            viewer.take_over()

block() if flavour == "sync" else anyio.run(main, backend=flavour)
"""


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_program_that_gives_up_ends_without_a_warning(
    flavour: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With every warning of Python's development mode an error."""
    async with _session_to_leave(tmp_path, monkeypatch) as (url, session):
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", _PROGRAM, flavour, url, KEY, session]
        with trio.fail_after(patience(20)):
            done = await trio.run_process(command, capture_stderr=True, check=False)
        assert (done.returncode, done.stderr.decode()) == (0, "")


_INTERRUPTED = """
import sys
from sandkasten import sync

use, url, key, session = sys.argv[1:]
with sync.SandboxClient(base_url=url, api_key=key) as client:
    try:
        box = client.session(session)
        box.exec("held") if use == "exec" else list(box.exec_stream("held"))
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("use", ["exec", "stream"])
async def test_ctrl_c_in_the_blocking_client_ends_the_run(
    use: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the program goes on, and nobody is warned."""
    async with _session_to_leave(tmp_path, monkeypatch) as (url, session):
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", _INTERRUPTED, use, url, KEY, session]
        async with SandboxClient(base_url=url, api_key=KEY) as client, trio.open_nursery() as nursery:
            box = client.session(session)
            start = functools.partial(trio.run_process, command, capture_stdout=True, capture_stderr=True)
            program: trio.Process = await nursery.start(start)

            async def runs() -> bool:
                return bool(await box.runs(state="running"))

            await until(runs)
            program.send_signal(signal.SIGINT)
            with trio.fail_after(patience(20)):
                assert await program.wait() == 0
            assert await box.runs(state="running") == []


async def _nothing_is_left(running: RunningTree) -> bool:
    async with SandboxClient(base_url=running.url, api_key=KEY) as client:
        live = await client.list_sessions()
    return all(run.reply is not None for run in running.tree.runs) and len(live) == 1
