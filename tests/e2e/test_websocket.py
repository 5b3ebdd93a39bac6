"""Runs and terminals over WebSockets of a real daemon: real shells, real pipes, real ends."""

from __future__ import annotations

import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio

from tests.api.harness import Running
from tests.api.ws_client import Chunk, Message, Talk, output_of, talk
from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.waiting import patience

PIECE = 64 * 1024


@pytest.fixture
def session_id(client: httpx.Client) -> str:
    return str(client.post("/v1/sessions", json={}).json()["id"])


def opened(daemon: Daemon, path: str) -> AbstractAsyncContextManager[Talk]:
    """Open a WebSocket."""
    url = daemon.wait_url()
    running = Running(url, urlsplit(url).port or 0, [url], trio.CancelScope(), trio.Event())
    return talk(running, path, key=KEY)


@asynccontextmanager
async def connected(daemon: Daemon, session_id: str, kind: str = "exec", query: str = "") -> AsyncIterator[Talk]:
    """Open a WebSocket of a session and take its first message."""
    async with opened(daemon, f"/v1/sessions/{session_id}/{kind}/ws{query}") as client:
        await client.hear_text("hello" if kind == "exec" else "ready")
        yield client


def last(messages: list[Message]) -> dict[str, Any]:  # JSON values
    message = messages[-1]
    assert isinstance(message, dict)
    return message


async def test_a_shell_keeps_its_state_over_one_connection(daemon: Daemon, session_id: str) -> None:
    """Streams are apart and exact, the status is the command's, and `cd` lasts."""
    async with connected(daemon, session_id) as client:
        heard = await client.run(1, "cd /tmp; X=7; printf 'a\\0\\377'; printf b >&2; (exit 3)")
        assert (output_of(heard), output_of(heard, 2), last(heard)["exit_code"]) == (b"a\0\xff", b"b", 3)
        assert output_of(await client.run(1, "echo $PWD $X")) == b"/tmp 7\n"


async def test_an_interrupt_ends_the_command_and_not_the_shell(daemon: Daemon, session_id: str) -> None:
    """An interrupt ends the command; the shell keeps its variables."""
    async with connected(daemon, session_id) as client:
        await client.run(1, "X=kept")
        await client.say("start", id=1, cmd="echo on; sleep 1000")
        heard = await client.hear_until("started")
        while output_of(heard) != b"on\n":
            heard.append(await client.hear())
        await client.say("signal", id=1, signal="INT")
        assert last(await client.hear_until("exit", 1))["exit_code"] == 130
        assert output_of(await client.run(1, "echo $X")) == b"kept\n"


async def test_a_megabyte_goes_in_and_comes_out(daemon: Daemon, session_id: str) -> None:
    """A megabyte of input and of output passes byte for byte, as fast as credit and grants allow."""
    data = bytes(range(256)) * 4096
    async with connected(daemon, session_id) as client, trio.open_nursery() as nursery:
        granted = 256 * 1024
        news = trio.Event()

        async def feed() -> None:
            nonlocal granted, news
            position = 0
            while position < len(data):
                while not granted:
                    await news.wait()
                part = data[position : position + min(granted, PIECE)]
                position += len(part)
                granted -= len(part)
                await client.feed(1, part)
            await client.say("close_stdin", id=1)

        await client.say("start", id=1, cmd="cat", stdin=True)
        nursery.start_soon(feed)
        received = bytearray()
        while True:
            message = await client.hear()
            if isinstance(message, Chunk):
                received += message.data
                await client.say("credit", id=1, bytes=len(message.data))
            elif message["type"] == "credit":
                granted += message["bytes"]
                news.set()
                news = trio.Event()
            elif message["type"] == "exit":
                break
        assert bytes(received) == data


async def test_a_reader_without_credit_stops_its_own_run(daemon: Daemon, session_id: str) -> None:
    """A run without credit stands still, another on the connection is served, and no output is lost."""
    async with connected(daemon, session_id) as client:
        await client.say("start", id=1, argv=["seq", "1", "400000"], credit=100_000)
        first = await client.hear_until("started")
        while len(output_of(first)) < 100_000:
            first.append(await client.hear())
        assert output_of(await client.run(2, "echo other")) == b"other\n"
        await client.say("credit", id=1, bytes=2**24)
        rest = await client.hear_until("exit", 1)
    wanted = b"".join(b"%d\n" % number for number in range(1, 400_001))
    assert output_of(first) + output_of(rest) == wanted


async def test_a_run_goes_on_without_its_connection_and_is_resumed(daemon: Daemon, session_id: str) -> None:
    """A resumed run's output continues behind the last whole piece, to the byte."""
    async with connected(daemon, session_id) as client:
        command = "for i in $(seq 1 2000); do echo line-$i-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done"
        await client.say("start", id=1, cmd=command, exec_id="long", credit=20_000)
        heard = await client.hear_until("started")
        while len(output_of(heard)) < 20_000:
            heard.append(await client.hear())
    whole = {each.sequence for each in heard if isinstance(each, Chunk) and not each.more}
    kept = [each for each in heard if isinstance(each, Chunk) and each.sequence in whole]
    async with connected(daemon, session_id) as client:
        await client.say("attach", id=5, exec_id="long", after=max(whole, default=0))
        rest = await client.hear_until("exit", 5)
    text = b"".join(each.data for each in kept) + output_of(rest)
    assert text.splitlines()[::500] == [
        b"line-%d-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx" % number for number in (1, 501, 1001, 1501)
    ]
    assert len(text.splitlines()) == 2000


async def test_what_waits_for_its_turn_is_treated_as_its_client_wished(daemon: Daemon, session_id: str) -> None:
    """A queued command that is cancelled, by order or with its client, never runs; a detached one runs without a
    client.
    """
    async with connected(daemon, session_id) as client:
        await client.say("start", id=1, cmd="sleep 1000", exec_id="first")
        await client.hear_text("started")
        await client.say("start", id=2, cmd="touch cancelled", exec_id="cancelled")
        await client.say("cancel", id=2)
        assert last(await client.hear_until("exit", 2))["cause"] == "cancelled"
        await client.say("start", id=3, cmd="touch left", exec_id="left", on_disconnect="cancel")
        await client.say("start", id=4, cmd="touch stayed; echo here", exec_id="stayed")
        await client.say("ping")
        await client.hear_text("pong")
    async with connected(daemon, session_id) as client:
        await client.say("attach", id=1, exec_id="first")
        await client.hear_text("started")
        await client.say("cancel", id=1, now=True)
        await client.hear_until("exit", 1)
        await client.say("attach", id=4, exec_id="stayed")
        assert output_of(await client.hear_until("exit", 4)) == b"here\n"
        assert output_of(await client.run(1, "ls")) == b"stayed\n"


async def test_a_destroyed_session_ends_its_connections(daemon: Daemon, client: httpx.Client, session_id: str) -> None:
    """Each channel hears of it, and then the connection is closed with 4410."""
    async with connected(daemon, session_id) as busy, connected(daemon, session_id) as idle:
        await busy.say("start", id=1, cmd="sleep 1000")
        await busy.hear_text("started")
        await trio.to_thread.run_sync(client.delete, f"/v1/sessions/{session_id}")
        message = await busy.hear()
        assert isinstance(message, dict)
        assert (message["type"], message["id"]) in {("exit", 1), ("error", 1)}
        assert [(await each.hear_close())[0] for each in (busy, idle)] == [4410, 4410]


@dataclass
class Screen:
    """Messages of a terminal's connection. `takes_text`: control messages count as well; without it none may come."""

    client: Talk
    takes_text: bool = False
    gives_credit: bool = False
    seen: bytes = b""

    async def see(self, mark: bytes) -> None:
        """Wait until `mark` comes, behind what was seen before."""
        with trio.fail_after(patience(30)):
            while mark not in self.seen:
                message = await self.client.connection.get_message()
                assert self.takes_text or isinstance(message, bytes), message
                if self.gives_credit:
                    await self.client.say("credit", bytes=len(message))
                self.seen += message if isinstance(message, bytes) else message.encode()
        self.seen = self.seen[self.seen.index(mark) + len(mark) :]


async def test_a_terminal_is_a_real_one(daemon: Daemon, session_id: str) -> None:
    """A terminal over the socket has a size, a controlling terminal, and Ctrl-C."""
    async with connected(daemon, session_id, "terminal", "?cols=91&rows=17") as client:
        send, see = client.connection.send_message, Screen(client).see
        await send(b"stty size; echo d''one\n")
        await see(b"17 91")
        await see(b"done")
        await send(
            b"sh -c 'echo be\"\"gun; exec sleep 1000'\n"
        )  # the program that prints `begun` can be interrupted from then on
        await see(b"begun")
        await send(b"\x03")
        await client.say("resize", cols=33, rows=44)
        await send(b"stty size\n")
        await see(b"44 33")
        await send(b"exit 4\n")
        messages: list[str | bytes] = []
        while not messages or isinstance(messages[-1], bytes):
            messages.append(await client.connection.get_message())
        assert '"exit_code":4' in str(messages[-1]).replace(" ", "")
        assert (await client.hear_close())[0] == 1000


async def test_the_shell_of_an_agent_is_watched_taken_over_and_given_back(daemon: Daemon, session_id: str) -> None:
    """A person sees what it prints, sits down at it, and leaves it with what they changed."""
    async with connected(daemon, session_id, "terminal", "?shell=default") as person:
        see = Screen(person, takes_text=True).see
        async with connected(daemon, session_id) as agent:
            await agent.run(1, "echo by-the-agent; cd /tmp")
            await see(b"by-the-agent")
            await person.say("take_over")
            await see(b'"taken_over"')
            await person.connection.send_message(b"X=by-a-person; cd /; echo do''ne\n")
            await see(b"done")
            await person.say("give_back")
            await see(b'"given_back"')
            assert output_of(await agent.run(1, "echo $X $PWD")) == b"by-a-person /\n"


@pytest.mark.skipif(shutil.which("vim") is None, reason="needs vim in the image `host`, which is this machine")
async def test_vim_edits_a_file_over_the_socket(daemon: Daemon, session_id: str) -> None:
    """An editor draws its screen, takes keys, writes the file and gives the prompt back."""
    async with connected(daemon, session_id, "terminal", "?cols=80&rows=24&window=65536") as person:
        type_keys, see = person.connection.send_message, Screen(person, gives_credit=True).see
        await type_keys(b"vim -u NONE -i NONE note.txt\n")
        await see(b"~")
        await type_keys(b"ihello from vim\x1b")
        await see(b"vim")
        await type_keys(b":wq\n")
        await see(b"written")
        await type_keys(b"echo ba''ck\n")
        await see(b"back")
    async with connected(daemon, session_id) as agent:
        assert output_of(await agent.run(1, "cat note.txt")) == b"hello from vim\n"


async def test_the_end_of_the_daemon_is_announced(data_dir: Path) -> None:
    """The daemon's stop closes a connection with 1001, so that its client knows to come back, or with 4410 where the
    session ends too.
    """
    with running_daemon(data_dir, "--stop-sessions") as daemon:
        with daemon.client() as http:
            session_id = http.post("/v1/sessions", json={}).json()["id"]
        async with connected(daemon, session_id) as client, opened(daemon, "/v1/events") as events:
            await events.hear_text("cursor")
            daemon.process.send_signal(signal.SIGTERM)
            assert (await client.hear_close())[0] == 4410
            assert (await events.hear_close())[0] == 1001
