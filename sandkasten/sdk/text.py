"""Text of a run's output: UTF-8 decoded, escape sequences removed, CRLF normalised; whole, or in pieces.

The server uses it for whole answers and server-sent events, the clients for what they get as bytes.

Sources: ECMA-48 §5.4 (control sequences), §5.6 (control strings), §8.3; ECMA-35 §13.2 (escape sequences); xterm's
ctlseqs for BEL as the end of OSC.
"""

from __future__ import annotations

import codecs
import re

MAX_STRING_CHARS = 4096
"""Longest body of an OSC, DCS, SOS, PM or APC string that is removed as one."""

_CSI = r"\[[0-?]{0,256}[ -/]{0,16}"
_STRING = rf"[\]PX^_][^\x07\x18\x1a\x1b\n]{{0,{MAX_STRING_CHARS}}}"
_INTERMEDIATE = r"[ -/]{1,16}"
_SINGLE = r"[0-OQ-WYZ\\`-~]"  # everything but the openers [ ] P X ^ _

_SEQUENCE = re.compile(rf"\x1b(?:{_CSI}[@-~]|{_STRING}(?:\x07|\x1b\\)|{_INTERMEDIATE}[0-~]|{_SINGLE})")
_OPEN = re.compile(rf"\x1b(?:{_CSI}|{_STRING}\x1b?|{_INTERMEDIATE})?\Z")


class OutputText:
    """The text of one stream, piece by piece. With `is_raw` bytes are only decoded. Bytes that are not UTF-8 become
    U+FFFD.

    The possible start of something longer is held back until it is decided. At most `MAX_STRING_CHARS` are held, so a
    program can't make output vanish by opening a sequence and never closing it.
    """

    def __init__(self, *, is_raw: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_raw = is_raw
        self._held = ""
        self._ends_in_cr = False

    def feed(self, data: bytes, *, is_last: bool = False) -> str:
        """Return the text that `data` completes; with `is_last` also all text held back."""
        text = self._decoder.decode(data, is_last)
        if self._is_raw:
            return text
        return self._newlines(self._without_sequences(text, is_last=is_last), is_last=is_last)

    @property
    def held(self) -> bytes:
        """The bytes held back. Fed to a new `OutputText` they give no text and bring it to the state of this one."""
        text = "\r" * self._ends_in_cr + self._held
        return text.encode() + self._decoder.getstate()[0]

    def _without_sequences(self, text: str, *, is_last: bool) -> str:
        text = self._held + text
        self._held = ""
        if "\x1b" not in text:
            return text
        if not is_last and (start := _open_from(text)) is not None:
            text, self._held = text[:start], text[start:]
        return without_sequences(text)

    def _newlines(self, text: str, *, is_last: bool) -> str:
        if self._ends_in_cr:
            text = "\r" + text
        self._ends_in_cr = not is_last and text.endswith("\r")
        if self._ends_in_cr:
            text = text[:-1]
        return text.replace("\r\n", "\n")


def without_sequences(text: str) -> str:
    """Return a whole text without its escape sequences; one that is never closed stays."""
    return _SEQUENCE.sub("", text)


def _open_from(text: str) -> int | None:
    """Return the start of a sequence that the end of `text` leaves undecided."""
    start = max(0, len(text) - MAX_STRING_CHARS - 8)
    match = _OPEN.search(text, start)
    return None if match is None else match.start()
