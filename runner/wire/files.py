"""Requests for files, and their answers: a part of `protocol`, from which all others import them.

Every sandbox takes them. Links on the way of a path are followed as far as the request's reach. A connection that a
`FileRequest` came on takes further ones of the same `user`, and no other request.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from runner.wire.codec import dataclass


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Read a regular file. Answer: STARTED with `FileInfo`, DATA*, then `Done`. For a PID 1 older than `FILES_VERSION`,
    which keeps paths to `/workspace`, `/tmp` and `/home/sandbox`; a newer one takes `GetFile` instead."""

    path: str
    max_bytes: int


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Replace a file with the DATA frames up to END. Answer: `Done` with the resolved path. For the same PID 1; a newer
    one takes `PutFile` instead."""

    path: str
    sync: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    """Base of the requests that a file worker performs: a process of its own, with the rights of `user` (None: the
    user of `Setup`; never another one in a sandbox without programs) and under the session's file rules.

    In a sandbox with programs a path may lead anywhere but to the kernel's own files (`/proc`, `/sys`); in one without,
    to the workspace alone. Relative paths begin at the workspace.
    """

    user: str | None = None
    lasts: ClassVar[bool] = False
    """True for a request that goes on until its client leaves."""


@dataclass(frozen=True, slots=True)
class ListFiles(FileRequest):
    """List the files below a directory behind `after`, in the order of the names' bytes, a directory before its
    content. Answer: `Listing`, whose names are paths below the directory.

    `depth`: levels of directories; links are not followed. `glob` (a pattern as in `GlobFiles`, of the name, or of the
    path below if it has a `/`) chooses what is listed, not which directories are entered. `after` is a name of a
    listing.
    """

    path: str
    after: str = ""
    limit: int = 1000
    depth: int = 1
    glob: str = ""


@dataclass(frozen=True, slots=True)
class GetFile(FileRequest):
    """Read a regular file, or its bytes from `start` to `end` (both included; without `start` the last `end` bytes).

    `if_none_match`: versions, or `*`, of which the client has the content; `if_range`: version that the part must be
    of, else the whole file comes. `head_only`: no DATA is wanted. Answer: STARTED with `FilePart`, DATA*, `Done`.
    """

    path: str
    start: int | None = None
    end: int | None = None
    if_none_match: tuple[str, ...] = ()
    if_range: str = ""
    head_only: bool = False


@dataclass(frozen=True, slots=True)
class PutFile(FileRequest):
    """Replace a file atomically with the DATA frames up to END, making its parents; closing before END leaves the old
    file. Without `mode` an existing file keeps its mode, and a new one gets 0644.

    `if_match`: versions, or `*`, one of which the old file must have; `create_only`: there must be none. With `sync`
    the answer comes once file and name are on the disk. Answer: `FilePut`, or `Unmatched`.
    """

    path: str
    mode: int | None = None
    if_match: tuple[str, ...] = ()
    create_only: bool = False
    sync: bool = False


@dataclass(frozen=True, slots=True)
class BeginUpload(FileRequest):
    """Make an empty part file beside the file that is to be written in several requests, and the directories above it.
    `upload_id`: 32 hexadecimal digits. Answer: `UploadState` with the resolved path, by which the upload goes on."""

    path: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class AppendUpload(FileRequest):
    """Append the DATA frames up to END to a part file that has `offset` bytes, until it has `max_bytes`. Bytes that
    came before the connection was closed are kept. Answer: `UploadState`."""

    path: str
    upload_id: str
    offset: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class LookUpload(FileRequest):
    """Look how much of a part file is there. Answer: `UploadState`."""

    path: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class CommitUpload(FileRequest):
    """Put a part file in place of the file, as `PutFile` does; not one of another size or digest (hexadecimal SHA-256).
    Answer: `FilePut`, `Unmatched` or `UploadState`."""

    path: str
    upload_id: str
    size_bytes: int | None = None
    sha256: str = ""
    mode: int | None = None
    if_match: tuple[str, ...] = ()
    create_only: bool = False
    sync: bool = False


@dataclass(frozen=True, slots=True)
class DropUpload(FileRequest):
    """Remove a part file; none is no error. Answer: `Done`."""

    path: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class MakeDirectory(FileRequest):
    """Make a directory; with `parents` those above it, too, and one that is there is no error. Answer: `Done`."""

    path: str
    parents: bool = False
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class MoveFile(FileRequest):
    """Move a file, a link itself, or a directory. The target is its new name, taken only with `overwrite`, and then not
    that of a directory with entries (`EXISTS`, `NOT_EMPTY`). Answer: `Done` with the target."""

    source: str
    target: str
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class CopyFile(FileRequest):
    """Copy a file, a link itself, or a directory with all below it; as `MoveFile`."""

    source: str
    target: str
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class ChangeMode(FileRequest):
    """Set the permission bits of a file, with `recursive` of all below it, links left out. Answer: `Done`."""

    path: str
    mode: int
    recursive: bool = False


@dataclass(frozen=True, slots=True)
class ChangeOwner(FileRequest):
    """Set the uid and gid of a file, -1 leaves one; as `ChangeMode`. Only root inside may give files away."""

    path: str
    owner: int = -1
    group: int = -1
    recursive: bool = False


@dataclass(frozen=True, slots=True)
class EditFiles(FileRequest):
    """Make edits of text files, all or none. The DATA frames up to END are a JSON list (see `edit.py`). `dry_run`:
    nothing is written. `sync`: as in `PutFile`. Answer: `Edited`, or `Unedited`."""

    dry_run: bool = False
    sync: bool = False


@dataclass(frozen=True, slots=True)
class ViewFile(FileRequest):
    """Read the lines of a text file from `first` to `last`, counted from 1. Answer: DATA*, then `Viewed`."""

    path: str
    first: int = 1
    last: int | None = None


@dataclass(frozen=True, slots=True)
class GlobFiles(FileRequest):
    """List the paths below a directory that a pattern (see `runner.files.search.Pattern`) fits, behind the path
    `after`, in the order of the names' bytes. Answer: `FoundFiles`, after 10 s with what was found by then."""

    path: str
    pattern: str
    after: str = ""
    limit: int = 1000


MAX_EDITS = 100
MAX_WATCHES = 8
"""Most edits of one request, and watches of one sandbox at a time."""

MAX_MATCHES = 10_000
MAX_CONTEXT = 10
MAX_SEARCHED_BYTES = 64 * 1024 * 1024
"""Bounds of a search: lines, lines around each, and the largest file."""


@dataclass(frozen=True, slots=True)
class SearchFiles(FileRequest):
    """Find the lines of a regular file, or of all below a directory, that hold a text, with `regex` a regular
    expression of bytes. Answer: DATA*, whose lines are `FileMatch`, then `Searched`, after `max_ms` at the latest.

    `glob` as in `GlobFiles`, of names if it has no `/`, chooses the files. `context`: lines before and after each.
    Larger files than `max_file_bytes` are left out, and unless `everything` those with NUL bytes, and `.git`.
    """

    path: str
    pattern: str
    regex: bool = False
    case: bool = True
    glob: str = ""
    context: int = 0
    max_matches: int = 1000
    max_file_bytes: int = 16 * 1024 * 1024
    everything: bool = False
    max_ms: int = 10_000


@dataclass(frozen=True, slots=True)
class WatchFiles(FileRequest):
    """Tell the changes of a file, or of a directory's entries, with `recursive` of all below, links not followed.
    Answer: STARTED with `Watching`, DATA*, whose lines are `FileChange`, and `Done` when the file is gone. After
    `silence_ms` without a change an empty line comes."""

    lasts: ClassVar[bool] = True
    path: str
    recursive: bool = False
    silence_ms: int = 15_000


@dataclass(frozen=True, slots=True)
class StatFiles(FileRequest):
    """Describe the files at many paths; a link itself unless `follow`. Answer: `FileStats`, for as many of the paths,
    from the first on, as fit into it."""

    paths: tuple[str, ...]
    follow: bool = False


@dataclass(frozen=True, slots=True)
class StatFile(FileRequest):
    """Describe the file at a path; a link itself, not its target. With `digest` the regular file that the path leads
    to, and its SHA-256. Answer: `FileEntry`."""

    path: str
    digest: bool = False


@dataclass(frozen=True, slots=True)
class RemoveFile(FileRequest):
    """Remove the file at a path; a link itself, not its target; a directory that is not empty only if `recursive`.

    Answer: `Done`."""

    path: str
    recursive: bool = False


@dataclass(frozen=True, slots=True)
class Measure(FileRequest):
    """Count the files below a directory, until `max_entries` or `max_ms` are reached. Answer: `Measured`."""

    path: str
    max_entries: int
    max_ms: int


ArchiveKind = Literal["tar", "zip"]


@dataclass(frozen=True, slots=True)
class Pack(FileRequest):
    """Make an archive of the files below a directory, a tar one (pax) or a zip one. Answer: DATA*, then `Packed`. A
    file that can't be read is an error before the first DATA; sockets, FIFOs and devices are left out and counted, in
    a zip archive links and names that are not UTF-8, too."""

    path: str
    kind: ArchiveKind = "tar"


@dataclass(frozen=True, slots=True)
class Unpack(FileRequest):
    """Unpack the archive in the DATA frames up to END below a directory, which is made if it is missing. Answer:
    `Packed`. Only directories, regular files and, of a tar archive, links are made, the rest is left out and counted.
    After an error the files unpacked by then stay. No worker may sync a whole file system: who asks has to. What is
    made is given to `owner` and `group`, -1 for those who make it; directories that are there stay whose they are."""

    max_entries: int
    max_bytes: int
    path: str = "."
    kind: ArchiveKind = "tar"
    owner: int = -1
    group: int = -1


# Answers.


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file that is about to be sent; `path` as in `FileEntry`."""

    path: str
    size_bytes: int
    truncated: bool


FileKind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Names, targets and paths are surrogate-escaped. `mode`: permission bits; `owner` and `group`: ids inside, with
    their names in `user_name` and `group_name` (empty: the image names none); `path` is resolved, and empty in a
    listing. `etag`: see `runner.files.tree.etag_of`. `sha256`: hexadecimal, empty if not asked for."""

    name: str
    kind: FileKind
    size_bytes: int
    mode: int
    owner: int
    mtime_us: int
    target: str = ""
    path: str = ""
    group: int = 0
    user_name: str = ""
    group_name: str = ""
    etag: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file that is about to be sent: `count` bytes from `offset` on. `result`: all of it, a part, no content
    since the client has it, or none since the part begins behind the end."""

    path: str
    size_bytes: int
    mtime_us: int
    etag: str
    result: Literal["whole", "part", "unchanged", "unsatisfiable"]
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class FilePut:
    """A file has its new content. `created`: there was none."""

    path: str
    etag: str
    size_bytes: int
    created: bool


@dataclass(frozen=True, slots=True)
class UploadState:
    """A part file and its size. `problem`: nothing was appended, since the size is not the `offset`; there was more
    than fits; or the part file is not put in place, since its size or its digest is another one."""

    path: str
    size_bytes: int
    problem: Literal["", "offset", "too_much", "size", "digest"] = ""


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Nothing was changed: the file is of another version. `etag` is empty if there is no file."""

    etag: str


@dataclass(frozen=True, slots=True)
class FileStats:
    """Entries in the order of the paths; None where no file is."""

    entries: tuple[FileEntry | None, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries in order. `more`: there are more behind the last one."""

    path: str
    entries: tuple[FileEntry, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """Paths below the directory `path`. `after`: the path up to which was looked, empty if there are no more."""

    path: str
    paths: tuple[str, ...]
    after: str


@dataclass(frozen=True, slots=True)
class FileMatch:
    """A line that holds a text, counted from 1, as is the character `column` where the text begins. A long line is
    `cut`: its text is the part around the match. Bytes that are not UTF-8 are U+FFFD."""

    path: str
    line: int
    column: int
    text: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Searched:
    """The end of a search: lines that were found, files that have them, files that were read, and those that were
    left out or may not be read. `truncated`: there are more matches; `timed_out`: some files were not reached."""

    matches: int
    files: int
    searched: int
    skipped: int
    truncated: bool
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Watching:
    """From now on every change is told."""

    path: str


ChangeKind = Literal["create", "write", "close", "remove", "rename", "chmod", "overflow"]


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file was made (or came from elsewhere), written to, closed by a writer, removed (or left), renamed to `to`, or
    has another mode or owner. `overflow`: some changes were lost, or some directories are not watched."""

    kind: ChangeKind
    path: str
    to: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """`entries` counts all files below, `files` the regular ones; `size_bytes` is the sum of their sizes, `disk_bytes`
    of the blocks they take. A file with several names counts once. `complete`: nothing was left uncounted."""

    entries: int
    files: int
    size_bytes: int
    disk_bytes: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """Contents of an archive that was packed or unpacked."""

    entries: int
    size_bytes: int
    skipped: int


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
