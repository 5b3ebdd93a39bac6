"""Values about persistent workspaces: what one is, what a caller wants of it, what lies in it. Frozen, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import datetime

import attrs

Within = Mapping[str, str]
"""Labels that a workspace must have to exist for who asks, and gets when they make it; empty: all of them exist."""

EVERYWHERE: Within = {}


def is_within(labels: Mapping[str, str], within: Within) -> bool:
    """Whether something with these labels exists for who asks."""
    return within.items() <= labels.items()


class WorkspaceMode(enum.StrEnum):
    """How a session has its workspace: beside others that share it, too, or alone."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


@attrs.frozen
class WorkspaceUsage:
    """What is in a workspace: `entries` of any kind, regular `files`, the bytes in them, the bytes they take on disk.

    `complete`: nothing was left uncounted, for being too much or closed to the sandbox user.
    """

    entries: int
    files: int
    size_bytes: int
    disk_bytes: int
    complete: bool
    measured_at: datetime


QUOTA_BYTES_BOUNDS = (16 << 20, 1 << 44)
QUOTA_FILES_BOUNDS = (256, 1 << 32)


@attrs.frozen
class WorkspaceQuota:
    """What may be in a workspace. `size_bytes` includes what its file system needs for itself."""

    size_bytes: int
    files: int


@attrs.frozen
class Workspace:
    """A workspace as it was at one moment. `has_directory` is false for one that is only remembered: its files are
    gone. `session_count`: sessions that had it, as far as they are remembered; `active_session_count`: have it now."""

    id: str
    created_at: datetime
    last_used: datetime
    labels: Mapping[str, str] = attrs.field(factory=dict)
    session_count: int = 0
    active_session_count: int = 0
    has_directory: bool = True
    quota: WorkspaceQuota | None = None
    usage: WorkspaceUsage | None = None


@attrs.frozen
class WorkspaceSpec:
    """What a new workspace begins with. `quota` None: nothing but the machine limits it, now and later."""

    labels: Mapping[str, str] = attrs.field(factory=dict)
    quota: WorkspaceQuota | None = None


@attrs.frozen
class WorkspacePatch:
    """What may change on a workspace; `None` leaves it as it is."""

    labels: Mapping[str, str] | None = None
    quota_bytes: int | None = None


@attrs.frozen
class FileInfo:
    """What is at a path. `kind` is file, directory, symlink or other; `mode` the permission bits; `owner` the uid
    inside. Names of bytes that are not UTF-8 are surrogate-escaped. `path` is resolved, and empty in a listing."""

    name: str
    kind: str
    size_bytes: int
    mode: int
    owner: int
    modified_us: int
    target: str = ""
    path: str = ""


@attrs.frozen
class FileListing:
    """Part of a directory, in the order of the names' bytes. `more`: there are entries behind the last one."""

    path: str
    entries: Sequence[FileInfo]
    more: bool


@attrs.frozen
class Packed:
    """What went into or came out of an archive; `skipped`: neither files nor directories nor links."""

    entries: int
    size_bytes: int
    skipped: int


@attrs.frozen
class FileHead:
    """A file that was opened for reading; `path` is resolved inside the sandbox, `size_bytes` what will be sent."""

    path: str
    size_bytes: int
    truncated: bool
