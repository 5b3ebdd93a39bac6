"""Servers and proxies that answer badly, late or not at all, and callers that give up at any moment."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from sandkasten import errors
from sandkasten.model import Stream
from sandkasten.sdk import SandboxClient, Session, transport
from sandkasten.sdk import client as client_module
from sandkasten.sdk import run as run_module
from tests.api.harness import KEY, RunningTree, running_front
from tests.fakes.runner import Script
from tests.waiting import patience, until

SESSION = "0123456789abcdef"


@asynccontextmanager
async def answering(answers: Sequence[bytes | None]) -> AsyncIterator[tuple[str, list[float]]]:
    """Serve these answers, one to each request, the last one for ever; None is silence. Yield the URL and the times."""
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
                if answer is None:
                    await trio.sleep_forever()
                else:
                    await stream.send_all(answer)
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
PAGE = answer(502, b"<html>bad gateway</html>", "Content-Type: text/html")


async def test_input_is_waited_for_as_long_as_the_program_reads_none() -> None:
    """The client's timeout is no time limit of the program."""
    async with answering([None]) as (url, _), SandboxClient(base_url=url, timeout=0.1) as client:
        with trio.move_on_after(1) as scope:
            await Session(client, SESSION).run("late").send("x")
        assert scope.cancelled_caught


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
async def test_a_refusal_that_may_pass_is_waited_for(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own and a proxy's."""
    monkeypatch.setattr(transport, "FIRST_WAIT_S", 0.01)
    async with answering([first, first, DONE]) as (url, times), SandboxClient(base_url=url) as client:
        assert (await Session(client, SESSION).exec("x")).output == "done"
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


async def test_the_servers_advice_is_followed() -> None:
    """`Retry-After` is the time to wait, and an advice beyond the call's own time ends it at once."""
    busy = refusal(503, "CAPACITY", "Retry-After: 1")
    async with answering([busy, DONE]) as (url, times), SandboxClient(base_url=url) as client:
        assert (await Session(client, SESSION).exec("x")).ok
        assert times[1] - times[0] >= 1
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
    """The call goes on until its time is over, and hangs never."""
    monkeypatch.setattr(transport, "FIRST_WAIT_S", 0.01)

    async with answering([said or None]) as (url, _), SandboxClient(base_url=url, timeout=0.3) as client:
        with trio.fail_after(patience()), pytest.raises((errors.ConnectionFailed, errors.DeadlineExceeded)):
            await client.node()


async def test_a_key_is_sent_to_the_server_alone() -> None:
    """A redirect is not followed."""
    moved = answer(302, b"", "Location: http://127.0.0.1:1/")
    async with answering([moved]) as (url, times), SandboxClient(base_url=url, api_key="secret") as client:
        with pytest.raises(errors.SandkastenAPIError):
            await client.node()
        assert len(times) == 1


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


async def _execute(client: SandboxClient, session: str) -> None:
    await Session(client, session).exec("held")


async def _stream(client: SandboxClient, session: str) -> None:
    async for _ in Session(client, session).exec_stream("held"):
        pass


async def _start(client: SandboxClient, session: str) -> None:
    async with Session(client, session).start("held") as run:
        await run.wait()


async def _process(client: SandboxClient, session: str) -> None:
    run = await Session(client, session).process("held")
    try:
        await run.wait()
    finally:
        with trio.CancelScope(shield=True):
            await run.cancel()


async def _create(client: SandboxClient, _session: str) -> None:
    async with await client.create_session() as box:
        await box.exec("held")


@pytest.mark.parametrize("use", [_execute, _stream, _start, _process, _create])
async def test_a_caller_may_give_up_at_any_moment(
    use: Callable[..., Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run and no session is left, nothing hangs, and nobody is warned."""
    monkeypatch.setattr(run_module, "_CANCEL_WAITS_S", (0.01, 0.03, 0.1))
    async with running_front() as running:
        running.tree.scripts["held"] = Script([(Stream.STDOUT, b"x")], hold=trio.Event())
        session = (await _made(running)).id
        gave_up = ended = 0
        for steps in range(1, 400):
            async with SandboxClient(base_url=running.url, api_key=KEY) as client:
                await client.healthz()
                instrument = _GivesUp(steps)
                with trio.fail_after(patience(20)), instrument.scope:
                    trio.lowlevel.add_instrument(instrument)
                    try:
                        with trio.move_on_after(0.1):
                            await use(client, session)
                    finally:
                        trio.lowlevel.remove_instrument(instrument)
                if instrument.scope.cancelled_caught:
                    gave_up += 1
                else:
                    ended += 1  # the run was waited for: further steps are of the same wait
                    break
        assert gave_up > 5
        assert ended

        await until(lambda: _nothing_is_left(running))


@pytest.mark.parametrize("use", [_execute, _stream, _start, _create])
async def test_a_caller_on_asyncio_may_give_up_at_any_moment(
    use: Callable[..., Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on trio: after any number of turns of the loop."""
    monkeypatch.setattr(run_module, "_CANCEL_WAITS_S", (0.01, 0.03, 0.1))

    async def give_up_everywhere(url: str, session: str) -> int:
        gave_up = 0
        for turns in range(0, 150, 7):
            async with SandboxClient(base_url=url, api_key=KEY) as client:
                await client.healthz()
                task = asyncio.ensure_future(use(client, session))
                for _ in range(turns):
                    await asyncio.sleep(0.0002 if turns > 75 else 0)
                task.cancel()
                await asyncio.wait([task], timeout=patience(20))
                gave_up += task.cancelled()
        return gave_up

    async with running_front() as running:
        running.tree.scripts["held"] = Script([(Stream.STDOUT, b"x")], hold=trio.Event())
        session = (await _made(running)).id
        gave_up = await trio.to_thread.run_sync(lambda: asyncio.run(give_up_everywhere(running.url, session)))
        assert gave_up == 22
        await until(lambda: _nothing_is_left(running))


async def _nothing_is_left(running: RunningTree) -> bool:
    async with SandboxClient(base_url=running.url, api_key=KEY) as client:
        live = await client.list_sessions()
    return all(run.reply is not None for run in running.tree.runs) and len(live) == 1


async def _made(running: RunningTree) -> Session:
    async with SandboxClient(base_url=running.url, api_key=KEY) as client:
        return await client.create_session()
