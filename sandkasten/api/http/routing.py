"""From a request's target to what answers there: whole segments, decoded one by one. Knows no URL of ours.

A path is cut at its slashes before anything is decoded, so an id with an encoded slash in it stays one segment and
`fs%2Fread` is no other spelling of `fs/read` (RFC 3986 §2.4). Nothing is tidied up: neither `//` nor `..`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar
from urllib.parse import unquote

import attrs

T = TypeVar("T")

_ABSOLUTE = re.compile(r"https?://([A-Za-z0-9._~:\[\]-]+)(/.*)?\Z", re.IGNORECASE)
"""Scheme, authority and path. No user (RFC 9110 §4.2.4) and nothing encoded in the authority."""


@attrs.frozen
class Target:
    """Where a request goes. The one reading of it, for all who decide something about it."""

    segments: tuple[str, ...]

    @property
    def path(self) -> str | None:
        """The whole path; None where other readers could see other segments in it: `/a%2Fb`, `//a`."""
        path = "/" + "/".join(self.segments)
        return None if path.startswith("//") or any("/" in segment for segment in self.segments) else path


def parse_target(raw_path: bytes, *, host: str | None) -> Target | None:
    """Return where a request goes by its target, which came without its query.

    It is a path or the absolute form of one, whose authority must then be the `Host` (RFC 9112 §3.2). None: it is no
    such thing, or a segment is not UTF-8.
    """
    path = raw_path.decode("latin-1")
    if (absolute := _ABSOLUTE.match(path)) is not None:
        authority, path = absolute[1], absolute[2] or "/"
        if host is None or authority.lower() != host.lower():
            return None
    if not path.startswith("/") or not path.isascii():
        return None
    try:
        return Target(tuple(unquote(segment, errors="strict") for segment in path[1:].split("/")))
    except UnicodeDecodeError:
        return None


class RouteTable(Generic[T]):
    """Patterns like `execs/{exec_id}/output`, each with what answers there. `{name}` is any one segment, not empty."""

    def __init__(self, routes: Mapping[str, T]) -> None:
        """Raises `ValueError` when a path could match two of the patterns."""
        self.routes = routes
        self._by_length: dict[int, list[tuple[tuple[str, ...], T]]] = {}
        for pattern, target in routes.items():
            segments = tuple(pattern.split("/"))
            alike = self._by_length.setdefault(len(segments), [])
            for other, _ in alike:
                if all(a == b or _is_open(a) or _is_open(b) for a, b in zip(segments, other, strict=True)):
                    raise ValueError(f"{pattern!r} and {'/'.join(other)!r} match the same path")
            alike.append((segments, target))

    def find(self, segments: Sequence[str]) -> tuple[T, dict[str, str]] | None:
        """Return what answers there and the open segments by name, or None."""
        located = self.locate(segments)
        return None if located is None else located[1:]

    def locate(self, segments: Sequence[str]) -> tuple[str, T, dict[str, str]] | None:
        """As `find`, and first of all the pattern itself."""
        for pattern, target in self._by_length.get(len(segments), ()):
            if all(
                wanted == given or (_is_open(wanted) and given) for wanted, given in zip(pattern, segments, strict=True)
            ):
                names = zip(pattern, segments, strict=True)
                opened = {wanted[1:-1]: given for wanted, given in names if _is_open(wanted)}
                return "/".join(pattern), target, opened
        return None


def _is_open(segment: str) -> bool:
    return segment.startswith("{")
