"""The greeting of a sandbox that is being made: early where a pool sandbox has a socket, in time where it has none."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.wire.protocol import ANSWERS, FROM_DAEMON, Error, FrameDecoder, HelloReply, Kind, Setup, encode_frame
from sandkasten.actors.session.birth import Greeting
from sandkasten.errors import InvalidRequest, RunnerLost
from sandkasten.host.paths import RUNNER_SOCKET
from tests.waiting import patience

REPLY = HelloReply("/bin/bash", "/workspace", version=Setup().version)


class Init:
    """A PID 1 to be: its socket is there, and it serves when it is told to."""

    def __init__(self, directory: Path, answer: HelloReply | Error = REPLY) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(directory / RUNNER_SOCKET))
        self.listener.listen()
        self.listener.setblocking(False)
        self.asked: list[Any] = []
        self._answer = answer

    async def serve(self) -> None:
        """Take one connection and answer the request on it."""
        with trio.socket.from_stdlib_socket(self.listener) as listener:
            connection, _ = await listener.accept()
            with connection:
                decoder = FrameDecoder(FROM_DAEMON, max_body_bytes=1 << 20)
                while not self.asked:
                    decoder.feed(await connection.recv(1 << 16))
                    self.asked += decoder
                kind = Kind.ERROR if isinstance(self._answer, Error) else Kind.REPLY
                await connection.send(encode_frame(kind, ANSWERS.encode(self._answer)))
                await connection.recv(1)  # until the other end closes


async def test_a_pool_sandbox_is_greeted_before_it_serves(tmp_path: Path) -> None:
    """The pool sandbox reads the greeting before anything else, and once only."""
    init = Init(tmp_path)
    greeting = Greeting(tmp_path, Setup())
    with trio.fail_after(patience(5)):
        async with trio.open_nursery() as nursery:
            greeting.begin(nursery)
            await trio.testing.wait_all_tasks_blocked()
            assert init.asked == []
            nursery.start_soon(init.serve)
            link, hello = await greeting.finish()
            with closing(link):
                assert hello == REPLY
                assert len(init.asked) == 1
                greeting.close()
                assert link.connections == {"connections_idle": 1, "connections_busy": 0}


async def test_a_pool_sandbox_that_is_gone_was_greeted_in_vain(tmp_path: Path) -> None:
    """The successor of a pool sandbox that is gone, under the same id, is greeted when it is built."""
    old, new = tmp_path / "old", tmp_path / "run"
    new.mkdir()
    Init(new).listener.close()
    greeting = Greeting(new, Setup())
    with trio.fail_after(patience(5)):
        async with trio.open_nursery() as nursery:
            greeting.begin(nursery)
            await trio.testing.wait_all_tasks_blocked()
            new.rename(old)
            new.mkdir()
            nursery.start_soon(Init(new).serve)
            link, hello = await greeting.finish()
            with closing(link):
                assert hello == REPLY


async def test_a_refusal_is_final(tmp_path: Path) -> None:
    """PID 1 has said what it thinks of the request: it is not asked again, and the link is closed."""
    init = Init(tmp_path, Error("NO_SUCH_USER", "nobody of that name"))
    greeting = Greeting(tmp_path, Setup(user="nobody"))
    with trio.fail_after(patience(5)), pytest.RaisesGroup(InvalidRequest):
        async with trio.open_nursery() as nursery:
            greeting.begin(nursery)
            nursery.start_soon(init.serve)
            with closing(greeting):
                await greeting.finish()
    assert len(init.asked) == 1


async def test_a_pool_sandbox_that_never_answers_is_given_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Counted from when it was said to be built, not from when it was greeted."""
    init = Init(tmp_path)
    greeting = Greeting(tmp_path, Setup())
    with closing(init.listener), pytest.RaisesGroup(RunnerLost):
        async with trio.open_nursery() as nursery:
            greeting.begin(nursery)
            await trio.sleep(1000)
            began = trio.current_time()
            with closing(greeting):
                await greeting.finish()
    assert trio.current_time() - began == pytest.approx(10)


async def test_a_build_that_fails_ends_the_greeting(tmp_path: Path) -> None:
    """No connection is left (the leak check of every test looks)."""
    greeting = Greeting(tmp_path, Setup())
    with closing(Init(tmp_path).listener):
        async with trio.open_nursery() as nursery:
            greeting.begin(nursery)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        greeting.close()
