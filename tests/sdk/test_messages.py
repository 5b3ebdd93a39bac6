"""Messages of streams: what the client says and takes is what the description has, and anything else is an error."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
import trio

from sandkasten import errors
from sandkasten.model import SessionSpec, Stream
from sandkasten.sdk import SandboxClient, Session, streams, terminal, transport
from sandkasten.sdk.channels import OutputPlace, RunChannel
from sandkasten.sdk.streams import EventFeed
from sandkasten.sdk.types import RunEnd
from sandkasten.sdk.wire import EXEC_PROTOCOL, TERMINAL_PROTOCOL, call, read_message
from tests.api.described import DOCUMENT, EVENTS, faults_of
from tests.api.harness import KEY, running_front
from tests.fakes.runner import Script
from tests.sdk.test_bad_servers import SESSION, answer, answering
from tests.waiting import patience

Json = Mapping[str, Any]
MESSAGES: Mapping[str, Json] = {
    operation["operationId"]: operation["x-messages"]
    for path in DOCUMENT["paths"].values()
    for operation in path.values()
    if "x-messages" in operation
}


def said_by(operation: str, medium: str, name: str, *, every: bool) -> Json:
    """Return a message of the server with the members that it must have, or with every one."""
    made = _example(MESSAGES[operation][medium]["server"][name], every=every)
    assert isinstance(made, dict)
    return made


def _example(schema: Json, *, every: bool) -> object:
    if "$ref" in schema:
        return _example(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]], every=every)
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], every=every)
    for name in ("const", "enum"):
        if name in schema:
            return schema[name] if name == "const" else schema[name][0]
    members = schema.get("properties", {})
    names = members if every else schema.get("required", ())
    made = {"object": {name: _example(members[name], every=every) for name in names}, "array": [], "boolean": True}
    return {**made, "integer": 7, "number": 7, "string": "eA=="}[schema["type"]]


@pytest.mark.parametrize("every", [False, True])
async def test_messages_of_runs_and_terminals_are_read_as_described(every: bool) -> None:
    """With the members that a message must have nothing is missed, and with every one nothing is overlooked."""
    for name in ("started", "exit", "detached", "error"):
        value = said_by("get_session_exec_ws", "websocket", name, every=every)
        channel = RunChannel(7, OutputPlace())
        channel.tell(read_message(json.dumps(value)), json.dumps(value))
        assert channel.exec_id == (value["exec_id"] if name == "started" else "")
        assert channel.is_over == (name in ("exit", "detached") or bool(value.get("final")))
        assert (channel.end is not None) == (name == "exit")
        assert (channel.error is not None) == (name == "error")
    viewer = Session(SandboxClient(), SESSION).terminal()
    for name in ("ready", "skipped", "taken_over", "given_back", "exit", "error"):
        value = said_by("get_session_terminal_ws", "websocket", name, every=every)
        viewer._take(json.dumps(value))
        if name == "ready":
            assert (viewer.id, viewer.cols, viewer.rows, viewer.taken_over) == ("eA==", 7, 7, True)
    assert (viewer.skipped, viewer.taken_over, viewer._answers, viewer.end is None) == (7, False, 2, False)
    assert list(viewer._refused) == (["eA=="] if every else [""])


async def test_events_of_a_run_are_read_as_described() -> None:
    """Pieces and the end of a run, with the members that they must have."""
    names = ("chunk", "done")
    values = [said_by("get_session_exec_stream", EVENTS, name, every=False) for name in names]
    said = "".join(f"event: {name}\ndata: {json.dumps(each)}\n\n" for name, each in zip(names, values, strict=True))
    async with answering([answer(200, said.encode())]) as (url, _), SandboxClient(base_url=url) as client:
        feed = EventFeed(client._transport, call("GET", "/"), "x")
        assert await feed.next() == streams.Piece("stdout", b"x", 0, 7)
        assert isinstance(await feed.next(), RunEnd)


async def test_what_the_client_says_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of message over the WebSocket of the runs and over a terminal's."""
    said: dict[str, list[Json]] = defaultdict(list)
    place = "get_session_exec_ws"

    class Heard(transport.WebSocket):
        async def send(self, message: str | bytes) -> None:
            if isinstance(message, str):
                said[place].append(json.loads(message))
            await super().send(message)

    monkeypatch.setattr(transport, "WebSocket", Heard)
    monkeypatch.setattr(terminal, "WINDOW_BYTES", 64 * 1024)
    async with running_front() as running, SandboxClient(base_url=running.url, api_key=KEY) as client:
        running.tree.scripts["much"] = Script([(Stream.STDOUT, bytes(64 * 1024))], repeat=64)
        running.tree.scripts[""] = Script(echo=True)
        box = client.session((await running.supervisor.create(SessionSpec())).id)
        async with box.start(["much"], cwd="/", env={"A": "b"}, user="1000", raw=True) as run:
            for _ in range(8):
                await anext(run)
            await run.aclose()
            await anext(run)
        async with box.start("much", stdin=True, tty=(80, 24), stateless=True, merged=True) as run:
            await anext(run)
        place = "get_session_terminal_ws"
        async with box.terminal(shell="default") as viewer:
            await viewer.take_over()
            await viewer.send(bytes(16 * 1024))
            left = 16 * 1024
            while left > 0:
                left -= len(await anext(viewer))
            await viewer.resize(90, 30)
            await viewer.give_back()
    kinds = {place: {each["type"] for each in values} for place, values in said.items()}
    assert kinds == {
        "get_session_exec_ws": {"start", "ping", "attach", "credit", "detach", "cancel"},
        "get_session_terminal_ws": {"take_over", "give_back", "resize", "credit"},
    }
    for place, values in said.items():
        described = MESSAGES[place]["websocket"]["client"]
        assert [faults_of(each, described[each["type"]]) for each in values] == [[]] * len(values)


async def _run(_client: SandboxClient, box: Session) -> None:
    await box.run("x").wait()


async def _begun(_client: SandboxClient, box: Session) -> None:
    async for _ in box.exec_stream("x"):
        pass


async def _terminal(_client: SandboxClient, box: Session) -> None:
    async with box.terminal() as viewer:
        await anext(viewer)


async def _watch(_client: SandboxClient, box: Session) -> None:
    await anext(box.files.watch())


async def _events(client: SandboxClient, _box: Session) -> None:
    await anext(client.events())


UPGRADED = (
    "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Accept: ACCEPT-KEY\r\nSec-WebSocket-Protocol: {}\r\n\r\n"
)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (_run, '{"type":"exit","id":1}'),
        (_begun, '{"type":"exit","id":1}'),
        (_run, '{"type":"started","id":1}'),
        (_run, '{"type":"exit","id":[]}'),
        (_terminal, '{"type":"ready"}'),
        (_terminal, '{"type":"skipped","bytes":"x"}'),
        (_terminal, "{"),
        (_terminal, "[]"),
        (_run, "event: chunk\ndata: {}\n\n"),
        (_begun, "event: chunk\ndata: {}\n\n"),
        (_run, "event: done\ndata: []\n\n"),
        (_run, 'event: chunk\nid: x\ndata: {"chunk":"","stream":"stdout","timestamp":1}\n\n'),
        (_watch, "event: write\ndata: 1\n\n"),
        (_events, "event: exec.ended\ndata: {}\n\n"),
    ],
)
async def test_what_is_none_of_the_protocol_is_an_error_of_the_connection(
    read: Callable[[SandboxClient, Session], Awaitable[None]], message: str
) -> None:
    """Over a WebSocket and as events, of whatever shape; a run that was begun is cancelled."""
    head = UPGRADED.format(TERMINAL_PROTOCOL if read is _terminal else EXEC_PROTOCOL).encode()
    frame = head + bytes([0x81, len(message)]) + message.encode()  # RFC 6455 §5.2
    said = answer(200, message.encode()) if message.startswith("event") else frame
    async with answering([said]) as (url, _), SandboxClient(base_url=url, timeout=1) as client:
        with trio.fail_after(patience()), pytest.raises(errors.ConnectionFailed, match="none of the protocol"):
            await read(client, Session(client, SESSION))
