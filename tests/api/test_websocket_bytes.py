"""Bytes on a WebSocket below the level of messages: malformed frames, sizes, closing (RFC 6455)."""

from __future__ import annotations

import contextlib
import gc
import json
import struct

import pytest
import trio

from sandkasten.api.http.websocket import MAX_CONTROL_FRAMES, MAX_PARTS
from tests.api.harness import KEY, Steps, read_until, running_front
from tests.api.ws_client import client_frame, close_code, exec_talk, handshake, make_session, opened

EXEC = "/v1/sessions/{}/exec/ws"


BROKEN = {
    "unmasked": (b"\x81\x05hello", 1002),
    "reserved bits": (b"\xf1\x80\x00\x00\x00\x00", 1002),
    "unknown opcode": (client_frame(3, b""), 1002),
    "text that is not UTF-8": (client_frame(1, b"\xff\xfe"), 1007),
    "continuation of nothing": (client_frame(0, b"x"), 1002),
    "long ping": (client_frame(9, bytes(126)), 1002),
    "ping in parts": (client_frame(9, b"", is_final=False), 1002),
    "message in a message": (client_frame(1, b"a", is_final=False) + client_frame(1, b"b"), 1002),
    "close with half a code": (client_frame(8, b"\x03"), 1002),
    "a giant frame": (b"\x82\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00", 1002),
    "large": (client_frame(2, bytes(1024 * 1024 + 1)), 1009),
    "large in parts": (client_frame(2, bytes(600_000), is_final=False) + client_frame(0, bytes(600_000)), 1009),
    "large text": (client_frame(1, "ä".encode() * 600_000), 1009),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_bytes_that_are_no_message_close_the_connection(name: str) -> None:
    """With the code that says why, and for this connection alone."""
    data, code = BROKEN[name]
    async with running_front() as running, await running.connect() as stream:
        await opened(running, stream)
        await stream.send_all(data)
        assert await close_code(stream) == code
        assert await running.is_alive()


async def test_a_message_of_the_allowed_size_is_taken() -> None:
    """One MiB, also in many parts and with a ping between them."""
    filler = b'{"type":"ping","data":"x","filler":"'
    text = filler + b"y" * (1024 * 1024 - len(filler) - 2) + b'"}'
    parts = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
    frames = [client_frame(1 if not index else 0, part, is_final=False) for index, part in enumerate(parts)]
    async with running_front() as running, await running.connect() as stream:
        await opened(running, stream)
        await stream.send_all(client_frame(1, text))
        await read_until(stream, b'"pong"')
        await stream.send_all(b"".join(frames[:4]) + client_frame(9, b"here") + b"".join(frames[4:]))
        await stream.send_all(client_frame(0, b""))
        received = await read_until(stream, b'"pong"')
        assert b"\x8a\x04here" in received


async def test_a_message_may_come_in_any_number_of_parts() -> None:
    """One byte each, characters split, with hundreds of empty ones between: the text is what it was."""
    text = '{"type":"ping","data":"\\r\\n é\U0001f980"}'.encode()
    parts = [part for byte in text for part in (bytes([byte]), *[b""] * 20)]
    frames = [client_frame(1 if not index else 0, part, is_final=False) for index, part in enumerate(parts)]
    async with running_front() as running, await running.connect() as stream:
        await opened(running, stream)
        await stream.send_all(b"".join(frames) + client_frame(0, b""))
        received = await read_until(stream, b'"pong"')
    assert json.loads(received[received.index(b"{") :])["data"] == "\r\n é\U0001f980"


async def test_a_message_has_a_bounded_number_of_parts() -> None:
    """Parts without bytes are never too large; one more than may be closes."""
    parts = client_frame(2, b"", is_final=False) + client_frame(0, b"", is_final=False) * MAX_PARTS
    async with running_front() as running, await running.connect() as stream:
        await opened(running, stream)
        await stream.send_all(parts)
        assert await close_code(stream) == 4429
        assert await running.is_alive()


@pytest.mark.parametrize("opcode", [9, 10])
async def test_pings_and_pongs_are_bounded(opcode: int) -> None:
    """A number within a second is taken; a flood closes the connection."""
    async with running_front() as running, await running.connect() as stream:
        await opened(running, stream)
        await stream.send_all(client_frame(opcode, b"x") * MAX_CONTROL_FRAMES + client_frame(1, b'{"type":"ping"}'))
        await read_until(stream, b'"pong"')
        await stream.send_all(client_frame(opcode, b"x") * 20_000)
        assert await close_code(stream) == 4429
        assert await running.is_alive()


async def test_thousands_of_tiny_frames_hold_up_nobody() -> None:
    """Frames are taken apart a few at a time: no step is more than a small part of what a read can hold."""
    text = b'{"type":"ping"}'
    parts = [bytes([byte]) for byte in text] + [b""] * 900
    frames = [client_frame(1 if not index else 0, part, is_final=False) for index, part in enumerate(parts)]
    messages = (b"".join(frames) + client_frame(0, b"")) * 10
    steps = Steps()
    async with running_front() as running, await running.connect() as stream:
        await opened(running, stream)
        trio.lowlevel.add_instrument(steps)
        gc.disable()  # a full collection belongs to no step, and takes longer the more tests have run before
        try:
            await stream.send_all(messages)
            received = b""
            while received.count(b'"pong"') < 10:
                received += await read_until(stream, b'"pong"')
        finally:
            gc.enable()
            trio.lowlevel.remove_instrument(steps)
    assert steps.longest_s < steps.whole_s / 10, (steps.longest_s, steps.whole_s)


UNPROVEN = {
    "pongs": client_frame(10, b"") * 2000,
    "parts": client_frame(2, b"", is_final=False) + client_frame(0, b"x", is_final=False) * 1500,
    "a large message": client_frame(2, bytes(100_000)),
    "pings of the largest size": client_frame(9, bytes(125)) * 100,
}


@pytest.mark.parametrize("name", UNPROVEN)
async def test_whoever_has_not_shown_the_key_may_say_little(name: str) -> None:
    """A client's first message is whole within 8 KiB, or the connection is closed, whatever the bytes are."""
    async with running_front() as running, await running.connect() as stream:
        await stream.send_all(handshake(EXEC.format(await make_session(running)), {}))
        await read_until(stream, b"\r\n\r\n")
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(UNPROVEN[name])
        assert await close_code(stream) in (1009, 4429)
        assert await running.is_alive()


async def test_what_comes_in_one_breath_with_the_key_is_heard() -> None:
    """The bound is for the first message, not for what follows it."""
    auth = client_frame(1, json.dumps({"type": "auth", "key": KEY}).encode())
    ping = client_frame(1, json.dumps({"type": "ping", "data": "x", "filler": "y" * 20_000}).encode())
    async with running_front() as running, await running.connect() as stream:
        request = handshake(EXEC.format(await make_session(running)), {})
        await stream.send_all(request + auth + ping)
        await read_until(stream, b'"pong"')


async def test_an_empty_binary_message_is_a_message() -> None:
    """An empty message arrives as no bytes, which is too short for a header; it is not ignored."""
    async with running_front() as running, exec_talk(running) as client:
        await client.connection.send_message(b"")
        assert await client.hear_close() == (4400, "a malformed frame: binary shorter than its header")


async def test_what_is_sent_together_with_the_handshake_is_heard() -> None:
    """A client that is in a hurry loses nothing."""
    async with running_front() as running, await running.connect() as stream:
        request = handshake(EXEC.format(await make_session(running)))
        await stream.send_all(request + client_frame(1, b'{"type":"ping","data":"early"}'))
        assert b'"pong"' in await read_until(stream, b'"early"')


async def test_a_client_that_closes_gets_its_close_back() -> None:
    """With the code it gave (RFC 6455 §5.5.1), and then the end of the connection."""
    async with running_front() as running, await running.connect() as stream:
        await opened(running, stream)
        await stream.send_all(client_frame(8, struct.pack("!H", 4999) + b"bye"))
        assert await close_code(stream) == 4999
