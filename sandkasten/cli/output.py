"""Output of client verbs: tables, JSON, spans and sizes for people, and a bar of progress.

Names, labels and output lines come out of sandboxes or from other users, so a cell of a table shows an escape sequence
or a bidirectional control as text and never obeys it (UAX #9; ECMA-48). Colour and bars are for terminals alone, and
not there with NO_COLOR or `--json`. JSON is ASCII, so that a terminal can't obey it either.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import select
import sys
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from sandkasten.cli.common import printable_line

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}
_STATUS_COLOURS = {
    **dict.fromkeys(("running", "ready", "ok"), "green"),
    **dict.fromkeys(("paused", "creating", "destroying", "draining", "queued"), "yellow"),
    **dict.fromkeys(("crashed", "lost", "not_ready"), "red"),
    **dict.fromkeys(("destroyed", "expired", "ended"), "dim"),
}
_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_BAR_CELLS = 20
_REDRAW_S = 0.1


def print_json(value: object) -> None:
    """Print one line of JSON; of a dataclass its fields."""
    print(json.dumps(plain(value), separators=(",", ":")), flush=True)


def plain(value: object) -> Any:  # a JSON value
    """Return the fields of a dataclass's instance as a mapping, any other value as it is."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


class HeldOutput(io.BytesIO):
    """Standard output of a client verb, which waits for no reader: what is printed is held until `write_held`."""

    def __init__(self) -> None:
        import anyio

        super().__init__()
        self._lock = anyio.Lock()

    def isatty(self) -> bool:
        """Return whether the output goes to a terminal at last."""
        return os.isatty(self.fileno())

    def fileno(self) -> int:
        """Return the descriptor to which the output goes at last."""
        return 1

    async def write_out(self) -> None:
        """Write what is held, each piece before the next. Raises `OSError`."""
        from sandkasten.cli.terminal import write_all

        async with self._lock:
            data = self.getvalue()
            self.seek(0)
            self.truncate()
            if data:
                await write_all(self.fileno(), data)


async def write_held() -> None:
    """Have what was printed written, by a thread, so that signals count while standard output takes nothing.

    A verb that prints again and again calls it each time; for the others it is called at their end. Raises `OSError`.
    """
    held = sys.stdout.buffer
    if isinstance(held, HeldOutput):
        await held.write_out()


def tell(line: str) -> None:
    """Print a line on standard error for the person; not on a terminal that takes nothing and would be waited for."""
    if _may_write_to_stderr():
        print(f"sandkasten: {printable_line(line)}", file=sys.stderr, flush=True)


def _may_write_to_stderr() -> bool:
    return not sys.stderr.isatty() or bool(select.select([], [sys.stderr], [], 0)[1])


def is_colourful(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that may get colour (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str | None) -> str:
    """Return a text in a colour, if standard output may have one."""
    if colour is None or not is_colourful(sys.stdout):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below their headers, with `-` for nothing. The last column is cut to the terminal."""
    for line in table(headers, rows):
        print(line)
    sys.stdout.flush()


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table. See `print_table`."""
    cells = [[_cell(each) for each in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(headers, *cells, strict=True)]
    room = _columns(sys.stdout) if sys.stdout.isatty() else None
    lines = [coloured(_line(headers, widths, room, plain=True), "dim")]
    return lines + [_line(row, widths, room) for row in cells]


def _line(row: Sequence[str], widths: Sequence[int], room: int | None, *, plain: bool = False) -> str:
    *first, last = row
    parts: list[str] = []
    for cell, width in zip(first, widths, strict=False):
        parts.append(_coloured_status(cell, plain=plain) + " " * (width - _width(cell)))
    if room is not None:
        last = cut(last, max(room - sum(widths[:-1]) - 2 * len(first), 8))
    return "  ".join([*parts, last])


def _coloured_status(cell: str, *, plain: bool = False) -> str:
    return cell if plain else coloured(cell, _STATUS_COLOURS.get(cell))


def _columns(stream: TextIO) -> int:
    return os.get_terminal_size(stream.fileno()).columns or 80


def _cell(value: object) -> str:
    return printable_line(str(value)) if value not in (None, "") else "-"


def _width(text: str) -> int:
    """Return the cells of a terminal that printable text takes (UAX #11)."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def cut(text: str, cells: int) -> str:
    """Return printable text in so many cells of a terminal; where it is too long, with an ellipsis at its end."""
    if _width(text) <= cells:
        return text
    fitting = sum(width < cells for width in itertools.accumulate(map(_width, text)))
    return f"{text[:fitting]}…"


def pairs(facts: Mapping[str, object]) -> None:
    """Print names and values, one pair a line; pairs without a value are left out."""
    width = max(map(len, facts))
    for name, value in facts.items():
        if value not in (None, ""):
            print(f"{coloured(name.ljust(width), 'dim')}  {_coloured_status(printable_line(str(value)))}")
    sys.stdout.flush()


def labels_text(labels: Mapping[str, str]) -> str:
    """Return labels as they are given."""
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))


# Figures


def size_text(size: float | None) -> str:
    """Return a number of bytes for people: `1.5 MiB`."""
    if size is None:
        return "-"
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def span_text(seconds: float) -> str:
    """Return a span for people, in its largest unit and the next: `2h 5m`, `1d`; less than a second is `0s`."""
    left = max(int(seconds), 0)
    first = next((at for at, (_, unit) in enumerate(_UNITS) if left >= unit), len(_UNITS) - 1)
    parts = []
    for name, unit in _UNITS[first : first + 2]:
        parts.append(f"{left // unit}{name}")
        left %= unit
    return " ".join(part for part in parts if part[0] != "0" or len(parts) == 1)


def since_text(moment: str | None) -> str:
    """Return how long ago a moment of the API is, or how far ahead, by this machine's clock; None: never."""
    if moment is None:
        return "never"
    return span_text(abs((datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()))


class Progress:
    """A line on standard error that tells how far a transfer is; none if that is no terminal, or `is_off`.

    Called with the bytes moved so far and their number in all, None if that is not known; redrawn ten times a second.
    """

    def __init__(self, title: str, *, is_off: bool = False) -> None:
        self._title = printable_line(title)
        self._is_on = sys.stderr.isatty() and not is_off
        self._began = time.monotonic()
        self._drawn_at = 0.0
        self.moved = 0
        self._total: int | None = None

    def __call__(self, moved: int, total: int | None) -> None:
        self.moved, self._total = moved, total
        now = time.monotonic()
        if self._is_on and now - self._drawn_at >= _REDRAW_S and _may_write_to_stderr():
            self._drawn_at = now
            sys.stderr.write(f"\r{cut(self._text(now), _columns(sys.stderr) - 1)}\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        """Leave the last state on a line of its own, if any was drawn."""
        if self._drawn_at and _may_write_to_stderr():
            self._drawn_at = 0.0
            sys.stderr.write(f"\r{self._text(time.monotonic())}\x1b[K\n")
            sys.stderr.flush()

    def _text(self, now: float) -> str:
        moved, total = self.moved, self._total
        rate = f"{size_text(moved / max(now - self._began, 0.001))}/s"
        if not total:
            return f"{self._title}  {size_text(moved)}  {rate}"
        share = f"{_bar(moved, total)} {100 * moved // total:3d} %"
        return f"{self._title}  {share}  {size_text(moved)} of {size_text(total)}  {rate}"


class StepProgress(Progress):
    """As `Progress`, of work that has steps: called with the number of the step that began, and how many there are."""

    step = ""
    """Name of the step."""

    def _text(self, now: float) -> str:
        moved, total = self.moved, self._total or 1
        reached = f"{_bar(moved, total)} {moved}/{total}  {printable_line(self.step)}"
        return f"{self._title}  {reached}  {span_text(now - self._began)}"


def _bar(moved: int, total: int) -> str:
    full = min(_BAR_CELLS * moved // total, _BAR_CELLS)
    return "█" * full + "░" * (_BAR_CELLS - full)
