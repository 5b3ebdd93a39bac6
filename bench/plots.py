"""Line plots as SVG, written by hand: a few polylines, axes and a legend, the same bytes for the same samples.

Not a library: the one that would do (matplotlib) brings 60 MB of packages for three plots, and its files differ from
version to version, so that each report would be a large change. Source: SVG 1.1 (W3C Recommendation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_INNER, _HEIGHT = 480, 420
_LEFT, _TOP, _BOTTOM = 70, 40, 50
_KEY, _LETTER = 44, 7
"""Widths of a line of the legend beside its name, and of a letter of 12 px, of those of most fonts the widest on
average."""
_FEW_POINTS = 12
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#000000",
    "#999999",
    "#7a4f01",
    "#5e3c99",
)
"""Okabe and Ito's colours, which people who see fewer colours can tell apart; then three more."""
_CDF_POINTS = 100


def cdf(values: Sequence[float]) -> Points:
    """Return the empirical distribution: (value, share of the values that are not above it)."""
    ordered = sorted(values)
    step = max(1, len(ordered) // _CDF_POINTS)
    picked = [*range(0, len(ordered) - 1, step), len(ordered) - 1] if ordered else []
    return [(ordered[at], (at + 1) / len(ordered)) for at in picked]


def plot(title: str, lines: Mapping[str, Points], *, x: str, y: str, log_x: bool = False, log_y: bool = False) -> str:
    """Return an SVG document with one polyline for each name. Points that a logarithmic axis lacks are left out."""
    shown = {
        name: [(px, py) for px, py in points if (px > 0 or not log_x) and (py > 0 or not log_y)]
        for name, points in lines.items()
    }
    xs = [px for points in shown.values() for px, _ in points] or [1.0]
    ys = [py for points in shown.values() for _, py in points] or [1.0]
    right = _LEFT + _INNER
    width = right + _KEY + _LETTER * max(map(len, shown), default=0)
    across = _Axis(xs, log_x, _LEFT, right)
    up = _Axis(ys, log_y, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, _TOP - 16, title, size=15),
        _text((_LEFT + right) / 2, _HEIGHT - 12, x, anchor="middle"),
        f'<g transform="rotate(-90 16 {_HEIGHT / 2})">{_text(16, _HEIGHT / 2, y, anchor="middle")}</g>',
    ]
    for value in across.ticks():
        at = across.place(value)
        parts.append(_line(at, _TOP, at, _HEIGHT - _BOTTOM))
        parts.append(_text(at, _HEIGHT - _BOTTOM + 16, f"{value:g}", anchor="middle"))
    for value in up.ticks():
        at = up.place(value)
        parts.append(_line(_LEFT, at, right, at))
        parts.append(_text(_LEFT - 6, at + 4, f"{value:g}", anchor="end"))
    for number, (name, points) in enumerate(shown.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{across.place(px):.1f},{up.place(py):.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if len(points) <= _FEW_POINTS:  # each of them is a measurement of its own
            dots = ((across.place(px), up.place(py)) for px, py in points)
            parts += [f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>' for cx, cy in dots]
        height = _TOP + 8 + 18 * number
        parts.append(f'<rect x="{right + 12}" y="{height - 8}" width="12" height="4" fill="{colour}"/>')
        parts.append(_text(right + 30, height, name))
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    def __init__(self, values: Sequence[float], is_log: bool, start: float, end: float) -> None:
        self._is_log, self._start, self._end = is_log, start, end
        low, high = (min(values), max(values)) if is_log else (min(0.0, *values), max(values))
        self._low, self._high = self._scale(low), self._scale(high)
        if self._high <= self._low:
            self._high = self._low + 1
        if not is_log:  # so that the last line has a number
            self._high = math.ceil(self._high / self._step() - 1e-9) * self._step()

    def _scale(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def place(self, value: float) -> float:
        share = (self._scale(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> Sequence[float]:
        if self._is_log:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [tick for tick in found if self._low - 1e-9 <= math.log10(tick) <= self._high + 1e-9]
        step = self._step()
        first = math.ceil(self._low / step)
        return [round(step * number, 10) for number in range(first, math.floor(self._high / step + 1e-9) + 1)]

    def _step(self) -> float:
        rough = (self._high - self._low) / 5 - 1e-9
        size = 10.0 ** math.floor(math.log10(rough))
        return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'
