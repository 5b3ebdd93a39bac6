"""Patterns of names: those of a `.dockerignore`, and those in COPY.

A pattern is matched part by part, `**` against any number of parts, so that no pattern takes long. Source: the
Dockerfile reference, ".dockerignore file"; Go's filepath.Match for one part.
"""

from __future__ import annotations

import fnmatch
import functools
import posixpath
import re
from collections.abc import Sequence

_MOST = 10_000
_LONGEST = 4096


class Ignored:
    """The patterns of a `.dockerignore`; the last one that fits a path or a directory above it decides.

    Raises:
        ValueError: the file is no list of patterns.
    """

    def __init__(self, content: bytes = b"") -> None:
        self._patterns: list[tuple[bool, Sequence[str]]] = []
        for line in content.decode("utf-8-sig").splitlines():
            text = line.strip()
            if not text or line.startswith("#"):
                continue
            is_kept = text.startswith("!")
            parts = parts_of(text.removeprefix("!").strip())
            if parts and ".." not in parts:
                self._patterns.append((is_kept, parts))
            if len(self._patterns) > _MOST or len(text) > _LONGEST:
                raise ValueError(f"at most {_MOST} patterns of {_LONGEST} characters")
        self.has_exceptions = any(is_kept for is_kept, _ in self._patterns)
        """Whether something below an ignored directory may be kept."""

    def __call__(self, path: str) -> bool:
        """Return whether a path of the context is left out."""
        parts = path.split("/")
        above = [parts[:count] for count in range(1, len(parts) + 1)]
        for is_kept, pattern in reversed(self._patterns):
            if any(matches(pattern, each) for each in above):
                return not is_kept
        return False


def parts_of(pattern: str) -> list[str]:
    """Return the parts of a pattern or a path; a leading `/` means nothing, `.` and `..` are taken out if they can."""
    clean = posixpath.normpath(pattern.lstrip("/") or ".")
    return [] if clean == "." else clean.split("/")


def is_pattern(text: str) -> bool:
    """Return whether a text has signs of a pattern."""
    return any(sign in text for sign in "*?[")


def matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Return whether a pattern fits a whole path."""
    # The ends of the path's beginnings that the pattern's beginning fits.
    ends = {0}
    for part in pattern:
        if part == "**":
            ends = set(range(min(ends), len(path) + 1))
        else:
            fits = _compiled(part)
            ends = {end + 1 for end in ends if end < len(path) and fits.match(path[end])}
        if not ends:
            return False
    return len(path) in ends


@functools.lru_cache(maxsize=4096)
def _compiled(part: str) -> re.Pattern[str]:
    """Return a pattern of one part. Python's fnmatch never tries a star twice, and has other signs in two places."""
    part = re.sub(r"\\(.)", lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], part, flags=re.DOTALL)
    return re.compile(fnmatch.translate(part.replace("[^", "[!")))
