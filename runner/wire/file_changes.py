"""Answers to requests that change or show text of files: parts of the vocabulary of `protocol`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FilePut:
    """A file has its new content. `created`: there was none."""

    path: str
    etag: str
    size_bytes: int
    created: bool


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Nothing was changed: the file is of another version. `etag` is empty if there is no file."""

    etag: str


@dataclass(frozen=True, slots=True)
class EditedFile:
    """An edit that was made. `etag` is empty for a file that is gone, or if nothing was written; `diff` is None for
    files that are no text, or if there is no room; `offsets`: lines by which the hunks of a patch were off."""

    etag: str
    replacements: int
    diff: str | None
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Edited:
    """All edits were made, in order."""

    files: tuple[EditedFile, ...]


@dataclass(frozen=True, slots=True)
class Unedited:
    """Nothing was changed, for the edit with an index: the text that it is for is there more than once (in `lines`),
    or not at all, or the file has another version, `etag` (empty: no file)."""

    edit: int
    reason: Literal["ambiguous", "absent", "version"]
    lines: tuple[int, ...] = ()
    etag: str = ""


@dataclass(frozen=True, slots=True)
class Viewed:
    """Lines of a file that were sent, and how many it has. `truncated`: there was no room for all that were wanted."""

    path: str
    etag: str
    first: int
    last: int
    total: int
    truncated: bool
