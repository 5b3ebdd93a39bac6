"""Reader of the front's answers for the attacks: an answer that could pass for more than it is must be noticed."""

from __future__ import annotations

import pytest

from sandkasten.api.http.websocket import Opcode, encode_frame
from sandkasten.security.attacks.http_front import read_events, read_frames


def test_a_stream_is_read_as_its_standard_says() -> None:
    """All three ends of a line, comments, and a block without data, which is no event."""
    body = b": ping\nid: 1\n\nevent: chunk\r\nid: 2\rdata: {}\n\n"
    assert read_events(body) == [{"event": "chunk", "id": "2", "data": "{}"}]


@pytest.mark.parametrize(
    "forged", [b"data: a\ndata: b\n\n", b"retry: 1\n\n", b"event: a\nevent: b\ndata: x\n\n", b"{}\n\n", b"\xff\n\n"]
)
def test_lines_that_nobody_wrote_are_no_events(forged: bytes) -> None:
    """Output that was let through as it is shows as a field that we never send, or one twice, or no text."""
    with pytest.raises(ValueError):
        read_events(b"event: chunk\ndata: {}\n\n" + forged)


def test_a_forged_end_is_one_more_event() -> None:
    """Not a value of the one before."""
    body = b'event: chunk\ndata: "x\n\nevent: done\ndata: {}\n\n'
    assert [each["event"] for each in read_events(body)] == ["chunk", "done"]


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
def test_messages_of_every_length_are_read(size: int) -> None:
    """As the server writes them, one behind the other."""
    data = encode_frame(Opcode.BINARY, bytes(size)) + encode_frame(Opcode.TEXT, b"{}")
    assert read_frames(data) == [(Opcode.BINARY, bytes(size)), (Opcode.TEXT, b"{}")]


@pytest.mark.parametrize("forged", [b"\x88\x00", b"\x01\x00", b"\x81\x80\0\0\0\0", b"\x82\x05abc", b"plain text"])
def test_what_is_no_message_of_a_server_is_refused(forged: bytes) -> None:
    """Control frames, parts, masks, cut ones."""
    with pytest.raises(ValueError):
        read_frames(encode_frame(Opcode.TEXT, b"{}") + forged)
