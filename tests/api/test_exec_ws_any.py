"""Exec WebSockets with any message in any order: answers, refusals or a close, and never a bug."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio_websocket import ConnectionClosed

from runner.wire.protocol import Error
from sandkasten.api.websocket.exec_messages import HEADER
from sandkasten.model import Stream
from tests.api.harness import running_front
from tests.api.ws_client import Talk, exec_talk
from tests.fakes.runner import Script
from tests.waiting import patience

CHANNELS = st.integers(1, 4)


def control(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:  # JSON values
    """Return messages of one type, sometimes with a field missing."""
    return st.fixed_dictionaries({"type": st.just(kind), "id": CHANNELS}, optional=fields).map(json.dumps)


COMMANDS = st.sampled_from(["x", "cat", "yes", "wait", "refused"])
SIZES = st.sampled_from([-1, 0, 1, 1000, 2**24])
MESSAGES = st.one_of(
    control(
        "start",
        cmd=COMMANDS,
        stdin=st.just(True),
        credit=SIZES,
        exec_id=st.sampled_from(["a", "b"]),
        on_disconnect=st.sampled_from(["cancel", "detach"]),
    ),
    control("attach", exec_id=st.sampled_from(["a", "b", "c"]), after=st.integers(-1, 3)),
    control("credit", bytes=SIZES),
    control("close_stdin"),
    control("signal", signal=st.sampled_from([0, 2, 15, "INT"])),
    control("resize", cols=st.integers(0, 3), rows=st.just(1)),
    control("cancel", now=st.booleans()),
    control("detach"),
    control("ping", data=st.text(max_size=3)),
    st.builds(lambda channel, data: HEADER.pack(channel, 0, 0) + data, CHANNELS, st.binary(max_size=5)),
)


async def hear_all(client: Talk, done: trio.Event) -> None:
    """Read what comes until the answer to the last ping, or the end."""
    try:
        while '"the last"' not in str(await client.connection.get_message()):
            pass
    except ConnectionClosed:
        pass
    done.set()


CONVERSATIONS = st.tuples(*[st.lists(MESSAGES, max_size=40)] * 3)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(CONVERSATIONS)
async def test_any_conversation_is_answered_or_refused(conversations: tuple[list[str | bytes], ...]) -> None:
    """The connection stays, or is closed with 4400 for a message that names no channel; afterwards all is as before."""
    async with running_front() as running:
        running.tree.scripts.update(
            cat=Script(echo=True),
            yes=Script([(Stream.STDOUT, bytes(1000)), (Stream.STDERR, b"x")], repeat=100),
            wait=Script(hold=trio.Event()),
            refused=Script(refusal=Error("TOO_MANY", "there are too many")),
        )
        for messages in conversations:
            async with exec_talk(running) as client, trio.open_nursery() as nursery:
                done = trio.Event()
                nursery.start_soon(hear_all, client, done)
                with trio.fail_after(patience()), contextlib.suppress(ConnectionClosed):
                    for message in (*messages, json.dumps({"type": "ping", "data": "the last"})):
                        await client.connection.send_message(message)
                    await done.wait()
            closed = client.connection.closed
            assert closed is not None
            assert closed.code in (1000, 4400)
        async with exec_talk(running) as again:
            assert isinstance(await again.run(1, "x"), list)
