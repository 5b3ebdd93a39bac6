"""Values of persistent workspaces: state, specs, quotas, and the files in them. Frozen, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Self

import attrs

Within = Mapping[str, str]
"""Labels that confine a caller: workspaces without them don't exist for the caller, and new ones get them."""

EVERYWHERE: Within = {}


def is_within(labels: Mapping[str, str], within: Within) -> bool:
    """Whether a workspace with these labels exists for the caller."""
    return within.items() <= labels.items()


class WorkspaceMode(enum.StrEnum):
    """Modes of a session's hold on its workspace: shared with others, or exclusive."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


@attrs.frozen
class WorkspaceUsage:
    """Use of a workspace: `entries` of any kind, regular `files`, their content in bytes, their size on disk in bytes.

    `complete`: every entry was counted; else some were beyond the bound of a measurement or closed to the sandbox user.
    """

    entries: int
    files: int
    size_bytes: int
    disk_bytes: int
    complete: bool
    measured_at: datetime


QUOTA_BYTES_BOUNDS = (16 << 20, 1 << 44)
QUOTA_FILES_BOUNDS = (256, 1 << 32)
_BYTES_PER_FILE = 8192


@attrs.frozen
class WorkspaceQuota:
    """Upper bounds of a workspace. `size_bytes` includes its file system's own data."""

    size_bytes: int
    files: int

    @classmethod
    def of(cls, size_bytes: int, files: int | None = None) -> Self:
        """Return a quota of that size, by default with one file for each 8 KiB."""
        return cls(size_bytes, size_bytes // _BYTES_PER_FILE if files is None else files)


MAX_UPLOADS = 16
"""Uploads of one session or workspace that have begun and not ended."""

WRITE_S = 1800.0
"""Until a whole file or tree is in its place or gone, and in a workspace on the disk."""

MAX_UNPACKED = 1_000_000
"""Entries of an archive that is unpacked."""

UPLOAD_S = 24 * 3600.0
"""Time that an upload may take; then its part file is removed."""


@attrs.frozen
class UploadSpec:
    """A file that is to come in several requests: its path (surrogate-escaped), and what must be true of it in the end.
    `user`: who writes it, by default the session's. `workspace_id`: the workspace of the session that it goes to."""

    path: str
    size_bytes: int | None = None
    sha256: str | None = None
    mode: int | None = None
    user: str | None = None
    workspace_id: str | None = None


@attrs.frozen
class Upload:
    """An upload that began. The path of its spec is resolved."""

    id: str
    spec: UploadSpec
    begun_at: datetime


@attrs.frozen
class Workspace:
    """A workspace at one moment. `has_directory` is false for a record whose files are gone.

    `session_count`: known sessions that ever held it; `active_session_count`: sessions that hold it now.
    """

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
    """A workspace to make. `quota` None: the configured default."""

    labels: Mapping[str, str] = attrs.field(factory=dict)
    quota: WorkspaceQuota | None = None


@attrs.frozen
class WorkspacePatch:
    """Changes of a workspace; `None` leaves a field as it is."""

    labels: Mapping[str, str] | None = None
    quota_bytes: int | None = None


@attrs.frozen
class FileHead:
    """A file opened for reading; `path` is resolved inside the sandbox, `size_bytes` the number of bytes to be sent."""

    path: str
    size_bytes: int
    truncated: bool
