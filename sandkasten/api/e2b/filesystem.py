"""E2B's `filesystem.Filesystem`: entries of directories, and changes of directories as streams or to be fetched.

Paths lead anywhere, with the rights of the request's user; relative ones begin at the user's home.

A watcher without a stream (the synchronous Python client polls) is a task of ours with a bounded list of events. Who
does not fetch for five minutes loses the watcher. The sandbox bounds how many it has.
"""

from __future__ import annotations

import posixpath
import secrets
import stat
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, ClassVar

import attrs
import trio

from runner.wire.protocol import (
    Done,
    FileChange,
    FileEntry,
    ListFiles,
    Listing,
    MakeDirectory,
    MoveFile,
    RemoveFile,
    StatFile,
    WatchFiles,
    Watching,
)
from sandkasten.api.e2b.connect import Code, ConnectError, envelope, integer, read_message, timestamp
from sandkasten.api.e2b.context import EnvdRequest, shown
from sandkasten.api.e2b.process import Writing, signs_of_life
from sandkasten.api.resources.fields import add_kinds
from sandkasten.api.resources.file_search import messages
from sandkasten.errors import FileNotFound, InvalidRequest, NotADirectory, SandkastenError
from sandkasten.model.workspace import WRITE_S


class Depth(int):
    """Levels of directories. No NewType: our API's description has no such field."""


add_kinds({Depth: lambda value: Depth(integer(value, high=64))})

_TYPES: Mapping[str, tuple[str, int]] = {
    "file": ("FILE_TYPE_FILE", stat.S_IFREG),
    "directory": ("FILE_TYPE_DIRECTORY", stat.S_IFDIR),
    "symlink": ("FILE_TYPE_SYMLINK", stat.S_IFLNK),
    "other": ("FILE_TYPE_UNSPECIFIED", 0),
}
_PAGE = 1000
_MAX_ENTRIES = 20_000
_MAX_LISTED_CHARS = 8 << 20
_LIST_S = 60.0


@attrs.frozen
class PathMessage:
    """A request about one path, without further fields."""

    path: str


@attrs.frozen
class ListMessage:
    """A directory; `depth` 0 or none stands for 1."""

    path: str
    depth: Depth | None = None


@attrs.frozen
class MoveMessage:
    """A file or directory, and its new name."""

    source: str
    destination: str


@attrs.frozen
class WatchMessage:
    """A directory to watch; with `recursive` all below, too."""

    path: str
    recursive: bool = False


@attrs.frozen
class WatcherMessage:
    """A watcher that was made before."""

    aliases: ClassVar[Mapping[str, str]] = {"watcherId": "watcher_id"}
    watcher_id: str


# Entries --------------------------------------------------------------------------------------------------------------


def spell_entry(entry: FileEntry, path: str) -> dict[str, Any]:
    """Return an entry as E2B's clients know it."""
    kind, bits = _TYPES[entry.kind]
    spelled: dict[str, Any] = {
        "name": shown(posixpath.basename(path)) or "/",
        "type": kind,
        "path": shown(path),
        "size": str(entry.size_bytes),
        "mode": entry.mode,
        "permissions": stat.filemode(bits | entry.mode),
        "owner": entry.user_name or str(entry.owner),
        "group": entry.group_name or str(entry.group),
    }
    if (modified := timestamp(entry.mtime_us)) is not None:
        spelled["modifiedTime"] = modified
    return {**spelled, "symlinkTarget": shown(entry.target)} if entry.kind == "symlink" else spelled


async def stat_path(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the properties of a file, of a link itself."""
    return await _entry_at(request, await request.place(read_message(message, PathMessage).path))


async def _entry_at(request: EnvdRequest, path: str) -> Mapping[str, Any]:
    path = posixpath.normpath(path)
    entry = await request.exchange.files.ask(StatFile(path, user=request.user), FileEntry)
    return {"entry": spell_entry(entry, path)}


async def list_dir(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """List a directory, and directories below it down to a depth. A link that is the path itself is followed, others
    are not."""
    asked = read_message(message, ListMessage)
    path = posixpath.normpath(await request.place(asked.path))
    entries: list[dict[str, Any]] = []
    after, chars = "", 0
    while True:
        wanted = ListFiles(path, after=after, limit=_PAGE, depth=asked.depth or 1, user=request.user)
        listing = await request.exchange.files.ask(wanted, Listing, patience_s=_LIST_S)
        entries += [spell_entry(each, posixpath.join(path, each.name)) for each in listing.entries]
        chars += sum(2 * len(each.name) + len(path) + len(each.target or "") for each in listing.entries)
        if len(entries) > _MAX_ENTRIES or chars > _MAX_LISTED_CHARS:
            raise ConnectError(
                Code.RESOURCE_EXHAUSTED,
                f"there are more than {_MAX_ENTRIES} files, or names of more "
                f"than {_MAX_LISTED_CHARS} characters, in {asked.path}",
            )
        if not listing.more or not listing.entries:
            return {"entries": entries}
        after = listing.entries[-1].name


async def make_dir(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make a directory and those above it."""
    path = posixpath.normpath(await request.place(read_message(message, PathMessage).path))
    files, user = request.exchange.files, request.user
    try:
        found = await files.ask(StatFile(path, user=user), FileEntry)
    except (FileNotFound, NotADirectory):
        pass
    else:
        if found.kind == "directory":
            raise ConnectError(Code.ALREADY_EXISTS, f"there is a directory already: {shown(path)}")
        raise InvalidRequest("the path is that of a file", path=shown(path)[:200])
    await files.ask(MakeDirectory(path, parents=True, user=user), Done, patience_s=WRITE_S)
    return await _entry_at(request, path)


async def move(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move a file or directory, in place of a file that has the new name; missing directories above that are made."""
    asked = read_message(message, MoveMessage)
    source, target = await request.place(asked.source), posixpath.normpath(await request.place(asked.destination))
    files, user = request.exchange.files, request.user
    await files.ask(StatFile(source, user=user), FileEntry)  # no directories for a file that is not there
    await files.ask(MakeDirectory(posixpath.dirname(target), parents=True, user=user), Done, patience_s=WRITE_S)
    await files.ask(MoveFile(source, target, overwrite=True, user=user), Done, patience_s=WRITE_S)
    return await _entry_at(request, target)


async def remove(request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove a file, or a directory with all that is in it."""
    path = await request.place(read_message(message, PathMessage).path)
    await request.exchange.files.ask(RemoveFile(path, recursive=True, user=request.user), Done, patience_s=WRITE_S)
    return {}


# Changes --------------------------------------------------------------------------------------------------------------

_EVENTS: Mapping[str, str] = {
    "create": "EVENT_TYPE_CREATE",
    "write": "EVENT_TYPE_WRITE",
    "remove": "EVENT_TYPE_REMOVE",
    "rename": "EVENT_TYPE_RENAME",
    "chmod": "EVENT_TYPE_CHMOD",
}
"""Changes that E2B has a name for."""


Batches = AsyncIterator[Sequence[FileChange]]


@asynccontextmanager
async def _watching(request: EnvdRequest, path: str, *, recursive: bool) -> AsyncGenerator[tuple[str, Batches], None]:
    """Watch a directory: yield its real path, once every change is told, and the changes as they come."""
    files, user = request.exchange.files, request.user
    if (await files.ask(StatFile(path, user=user), FileEntry)).kind == "file":
        raise InvalidRequest("only a directory can be watched", path=shown(path)[:200])
    async with files.stream(WatchFiles(path, recursive, user=user)) as stream:
        top = (await stream.head(Watching)).path
        async with aclosing(messages(stream, FileChange)) as batches:
            yield top, batches


def _events_of(change: FileChange, top: str) -> Sequence[dict[str, str]]:
    """Return E2B's events of a change. A rename is one of the old name, and a new file of the new one (inotify(7))."""
    kind = _EVENTS.get(change.kind)
    if kind is None:
        return ()
    events = [{"name": shown(posixpath.relpath(change.path, top)), "type": kind}]
    if change.kind == "rename" and change.to:
        events.append({"name": shown(posixpath.relpath(change.to, top)), "type": _EVENTS["create"]})
    return events


async def watch_dir(request: EnvdRequest, message: Mapping[str, Any], write: Writing) -> None:
    """Tell the changes in a directory, until the client leaves or its deadline has passed."""
    asked = read_message(message, WatchMessage)
    path = posixpath.normpath(await request.place(asked.path))
    await request.in_time(lambda: _tell_changes(request, path, asked, write))


async def _tell_changes(request: EnvdRequest, path: str, asked: WatchMessage, write: Writing) -> None:
    async with (
        _watching(request, path, recursive=asked.recursive) as (top, batches),
        signs_of_life(request, write, {"keepalive": {}}) as tell,
    ):
        await tell(envelope({"start": {}}))
        async for batch in batches:
            events = [envelope({"filesystem": event}) for change in batch for event in _events_of(change, top)]
            if events:
                await tell(b"".join(events))


_MAX_WATCHERS = 4096
_MAX_OF_SANDBOX = 8
"""Most watchers of one sandbox. The oldest ends for a new one."""
_MAX_WATCHED_EVENTS = 1000
_WATCHER_S = 300.0


@attrs.define
class PolledWatch:
    """A watcher that is polled. `failure` is why it tells no more."""

    session_id: str
    scope: trio.CancelScope
    fetched_at: float
    events: deque[dict[str, str]] = attrs.field(factory=lambda: deque(maxlen=_MAX_WATCHED_EVENTS))
    failure: SandkastenError | None = None


class Watchers:
    """All watchers that are polled, and their tasks: run by the front's owner."""

    def __init__(self) -> None:
        self._watchers: OrderedDict[str, PolledWatch] = OrderedDict()
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve watchers until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                while True:
                    await trio.sleep(_WATCHER_S / 4)
                    self._drop_old()
        finally:
            self._nursery = None
            self._watchers.clear()

    def _drop_old(self) -> None:
        now = trio.current_time()
        for watcher_id, watcher in list(self._watchers.items()):
            if watcher.fetched_at < now - _WATCHER_S:
                self._drop(watcher_id)

    def _drop(self, watcher_id: str) -> None:
        self._watchers.pop(watcher_id).scope.cancel()

    async def create(self, request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make a watcher; answered once every change is told."""
        asked = read_message(message, WatchMessage)
        path = posixpath.normpath(await request.place(asked.path))
        if self._nursery is None:
            raise ConnectError(Code.UNAVAILABLE, "the server is stopping")
        own = [each for each, watcher in self._watchers.items() if watcher.session_id == request.session.id]
        if len(own) >= _MAX_OF_SANDBOX:
            self._drop(own[0])
        elif len(self._watchers) >= _MAX_WATCHERS:
            raise ConnectError(Code.RESOURCE_EXHAUSTED, "the server has no room for another watcher")
        watcher = PolledWatch(request.session.id, trio.CancelScope(), trio.current_time())
        watcher_id = secrets.token_hex(8)
        await self._nursery.start(self._watch, watcher, request, path, asked.recursive)
        self._watchers[watcher_id] = watcher
        return {"watcherId": watcher_id}

    async def _watch(
        self,
        watcher: PolledWatch,
        request: EnvdRequest,
        path: str,
        recursive: bool,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        is_started = False
        with watcher.scope:
            try:
                async with _watching(request, path, recursive=recursive) as (top, batches):
                    is_started = True
                    task_status.started()
                    async for batch in batches:
                        watcher.events.extend(event for change in batch for event in _events_of(change, top))
            except SandkastenError as error:
                if not is_started:
                    raise
                watcher.failure = error

    async def fetch(self, request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the events since the last time."""
        watcher = self._find(request, message)[1]
        watcher.fetched_at = trio.current_time()
        if watcher.failure is not None and not watcher.events:
            raise watcher.failure
        events = list(watcher.events)
        watcher.events.clear()
        return {"events": events}

    async def remove(self, request: EnvdRequest, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """End a watcher."""
        self._drop(self._find(request, message)[0])
        return {}

    def _find(self, request: EnvdRequest, message: Mapping[str, Any]) -> tuple[str, PolledWatch]:
        watcher_id = read_message(message, WatcherMessage).watcher_id
        watcher = self._watchers.get(watcher_id)
        if watcher is None or watcher.session_id != request.session.id:
            raise ConnectError(Code.NOT_FOUND, f"there is no watcher {watcher_id[:64]!r}")
        return watcher_id, watcher
