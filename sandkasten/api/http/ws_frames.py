"""Frames that a WebSocket server sends, as bytes. Sans-I/O; what clients send is parsed by wsproto.

Server frames are not masked, so that a frame is a short head and the payload as it is, and several frames can go out
in one write.

Source: RFC 6455 §5.2 (framing), §5.5 (control frames), §7.4 (close codes).
"""

from __future__ import annotations

import enum
import struct

MAX_REASON_BYTES = 123

_FIN = 0x80
_SHORT = struct.Struct("!BB")
_MIDDLE = struct.Struct("!BBH")
_LONG = struct.Struct("!BBQ")


class Opcode(enum.IntEnum):
    TEXT = 0x1
    BINARY = 0x2


class CloseCode(enum.IntEnum):
    """Why a connection was closed: those of the RFC, and 4000 plus the HTTP status of the same refusal."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    ABNORMAL = 1006
    INVALID_TEXT = 1007
    TOO_BIG = 1009
    INTERNAL_ERROR = 1011
    INVALID = 4400
    UNAUTHORIZED = 4401
    NOT_FOUND = 4404
    SUBPROTOCOL = 4406
    ENDED = 4410
    TOO_MANY = 4429
    CAPACITY = 4503


def encode_frame(opcode: Opcode, *parts: bytes | memoryview) -> bytes:
    """Return one message of one frame whose payload is `parts` one after the other."""
    length = sum(map(len, parts))
    if length < 126:
        return b"".join((_SHORT.pack(_FIN | opcode, length), *parts))
    if length < 65536:
        return b"".join((_MIDDLE.pack(_FIN | opcode, 126, length), *parts))
    return b"".join((_LONG.pack(_FIN | opcode, 127, length), *parts))


def cut_reason(reason: str) -> str:
    """Return as much of `reason` as fits into a close frame, without splitting a character."""
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
