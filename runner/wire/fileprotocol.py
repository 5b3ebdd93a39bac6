"""The part of the contract (`protocol`) that is about files. Sans-I/O, values only.

Every sandbox reads and writes them; the rest is for one without programs (`RunnerConfig.files_only`), which holds one
workspace and nothing else. Links on the way of a path are followed as far as they stay inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Read a regular file as the sandbox user. Answer: STARTED with `FileInfo`, DATA*, then `Done`."""

    path: str
    max_bytes: int


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Replace a file atomically with the DATA frames up to END, as the sandbox user, making its parents.

    An existing file keeps its mode; a new one gets 0644. Closing before END leaves the old file untouched.
    Answer: `Done` with the resolved path; with `sync` once file and name are on the disk.
    """

    path: str
    sync: bool = False


# The requests below are for a sandbox without programs (`RunnerConfig.files_only`) alone.


@dataclass(frozen=True, slots=True)
class ListFiles:
    """List a directory, in the order of the names' bytes, those behind `after`. Answer: `Listing`."""

    path: str
    after: str = ""
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class StatFile:
    """Look at what is at a path, a link itself included. Answer: `FileEntry`."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove what is at a path, a link itself included; a directory with something in it only if `recursive`.

    Answer: `Done`."""

    path: str
    recursive: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """Count what is below a directory, until `max_entries` or `max_ms` are reached. Answer: `Measured`."""

    path: str
    max_entries: int
    max_ms: int


@dataclass(frozen=True, slots=True)
class Pack:
    """Make a tar archive (pax) of what is below a directory. Answer: DATA*, then `Packed`. What can't be read is an
    error before the first DATA; sockets, FIFOs and devices are left out and counted."""

    path: str


@dataclass(frozen=True, slots=True)
class Unpack:
    """Unpack the tar archive in the DATA frames up to END into the workspace. Answer: `Packed`. Only directories,
    regular files and links are made, the rest is left out and counted. What fails leaves what was unpacked by then."""

    max_entries: int
    max_bytes: int


# Answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileInfo:
    """`path` is resolved, absolute, inside the sandbox; bytes that are not UTF-8 are surrogate-escaped."""

    path: str
    size_bytes: int
    truncated: bool


FileKind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Names, targets and paths are surrogate-escaped. `mode`: the permission bits; `owner`: uid inside; `path` is
    resolved, and empty in a listing."""

    name: str
    kind: FileKind
    size_bytes: int
    mode: int
    owner: int
    mtime_us: int
    target: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries in order; `more`: ask again for those behind the last one."""

    path: str
    entries: tuple[FileEntry, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """`entries` counts all there are below, `files` the regular files, `size_bytes` what those hold, `disk_bytes` what
    they take; a file with several names counts once. `complete`: nothing was left uncounted."""

    entries: int
    files: int
    size_bytes: int
    disk_bytes: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """What went into or came out of an archive."""

    entries: int
    size_bytes: int
    skipped: int
