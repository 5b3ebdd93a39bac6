"""How many values a JSON text has, before it is parsed: a bound on what parsing costs, since nothing interrupts it.

16 MiB of text in one value are parsed in 30 ms, 16 MiB of empty arrays in more than a second. Counted are strings and
the signs that begin or part values (RFC 8259 §2); nothing is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import trio

from sandkasten.model.errors import InvalidRequest

MAX_VALUES = 128 * 1024
"""No request that means something has a tenth of them."""

SLICE_BYTES = 64 * 1024
SLICES_AT_ONCE = 256
"""How many are looked at before other tasks get a turn; between strings they are short ones."""

_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


async def check_value_count(body: bytes) -> None:
    """Refuse a JSON text with too many values.

    Raises:
        InvalidRequest: it has more than `MAX_VALUES`.
    """
    if len(body) <= MAX_VALUES:
        return
    count = seen_bytes = 0
    for turn, (values, size) in enumerate(_slices(body)):
        count += values
        seen_bytes += size
        if count > MAX_VALUES:
            raise InvalidRequest(f"the request body has more than {MAX_VALUES} values", body="has too many values")
        if seen_bytes >= SLICE_BYTES or turn % SLICES_AT_ONCE == 0:
            seen_bytes = 0
            await trio.lowlevel.checkpoint()


def _slices(body: bytes) -> Iterator[tuple[int, int]]:
    """Return for each part of the text, within or between strings, how many values begin there and its size."""
    position, is_string = 0, False
    while position < len(body):
        end = min(position + SLICE_BYTES, len(body))
        stop = _end_of_string(body, position, end) if is_string else body.find(b'"', position, end)
        values = 0
        if not is_string:
            stop = end if stop < 0 else stop
            values = sum(body.count(sign, position, stop) for sign in (b",", b"[", b"{"))
        if is_quote := body.startswith(b'"', stop):
            values += not is_string
            is_string = not is_string
        yield values, stop - position
        position = stop + is_quote


def _end_of_string(body: bytes, position: int, end: int) -> int:
    """Return where the string's quote is, or how far its text goes before `end`, which may cut an escape."""
    found = _IN_STRING.match(body, position, end)
    stop = position if found is None else found.end()
    return stop if stop > position or body.startswith(b'"', stop) else position + 1
