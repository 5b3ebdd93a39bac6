"""Output as text: what is removed, what stays, and that pieces give the same as the whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandkasten.sdk.text import MAX_STRING_CHARS, OutputText


def whole(data: bytes, *, is_raw: bool = False) -> str:
    """Return the text of one piece."""
    return OutputText(is_raw=is_raw).feed(data, is_last=True)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain\n", "plain\n"),
        (b"", ""),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"10%\r20%\r", "10%\r20%\r"),
        (b"a\r\r\nb", "a\r\nb"),
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b[1;38;5;200mx\x1b[K\r\x1b[m\n", "x\n"),
        (b"\x1b]0;title\x07x\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "xlink"),
        (b"\x1bPq data\x1b\\x\x1b_apc\x1b\\y", "xy"),
        (b"\x1b(B\x1b7\x1b8\x1b=\x1bcx", "x"),
        (b"\x1b[?25l\x1b[2Jx\x1b[?25h", "x"),
        (b"\x1b[\xc3\xa9", "\x1b[é"),
        (b"\x1b", "\x1b"),
        (b"\x1b[31", "\x1b[31"),
        (b"\x1b]never closed\nnext", "\x1b]never closed\nnext"),
        (b"\x1b]" + b"a" * (MAX_STRING_CHARS + 1) + b"\x07", "\x1b]" + "a" * (MAX_STRING_CHARS + 1) + "\x07"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd"),
        ("\u2028\x85\x0b\x0c\x00".encode(), "\u2028\x85\x0b\x0c\x00"),
    ],
)
def test_sequences_go_and_everything_else_stays(data: bytes, text: str) -> None:
    """Complete escape sequences and CRs before LFs vanish; nothing a program can write hides what follows it."""
    assert whole(data) == text


def test_raw_text_is_only_decoded() -> None:
    """`raw_output` keeps sequences and CRLF."""
    assert whole(b"\x1b[31ma\r\n\xff", is_raw=True) == "\x1b[31ma\r\n\ufffd"


_PIECES = st.sampled_from(
    [
        *(bytes([byte]) for byte in b"a\r\n\x1b[]3;m\\\x07P( \xc3\xa9\xf0\x9f\xff"),
        *(b"\x98\x80", b"\x1b[0m", b"\x1b]0;t\x07", b"\x1b]" + b"x" * (MAX_STRING_CHARS - 1), b"x" * 300),
    ]
)


@settings(deadline=None)
@given(st.lists(st.one_of(_PIECES, st.binary(max_size=8)), max_size=30), st.booleans())
@example([b"\x1b]", b"x" * MAX_STRING_CHARS, b"\x1b", b"\\", b"a"], False)
@example([b"\x1b[", b"0" * 256, b"m", b"\r", b"\x1b[m", b"\n"], False)
@example([b"\r", b"", b"\n"], False)
def test_pieces_give_the_same_text_as_the_whole(pieces: list[bytes], is_raw: bool) -> None:
    """Characters, sequences and line ends may be cut anywhere."""
    text = OutputText(is_raw=is_raw)
    parts = [text.feed(piece) for piece in pieces] + [text.feed(b"", is_last=True)]
    assert "".join(parts) == whole(b"".join(pieces), is_raw=is_raw)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_byte_by_byte_gives_the_same_text_as_the_whole(data: bytes) -> None:
    """The smallest pieces there are."""
    text = OutputText(is_raw=False)
    parts = [text.feed(bytes([byte])) for byte in data] + [text.feed(b"", is_last=True)]
    assert "".join(parts) == whole(data)


def test_what_is_held_back_is_bounded() -> None:
    """Text before an undecided sequence comes at once, and the sequence itself after a few KiB at the latest."""
    text = OutputText(is_raw=False)
    assert text.feed(b"progress 10%\r") == "progress 10%"
    assert text.feed(b"prompt> \x1b]") == "\rprompt> "
    held = len("\x1b]")
    for _ in range(10):
        held += 1000 - len(text.feed(b"a" * 1000))
    assert held <= MAX_STRING_CHARS + 8
