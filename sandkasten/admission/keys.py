"""API keys: the ring of those in force, their users, and the file they are kept in.

`KeyRing` is in memory: it finds a key by its token. Each request or connection is served within a `KeyUse`, which ends
when its key is revoked, changed to give less, or expires. `KeyWatch` reads the file and replaces the ring's keys when
the file changes. Nothing of a token is logged.

The file holds digests, never a key; it is read whole or not at all, and replaced in one step. The command line writes
it, the daemon only reads it: where the daemon has a user of its own, the file is root's, so that nothing that came in
through the network can make a key. A file that other users may write is not believed, since its writer makes keys. A
damaged file gives no key at all, rather than those that could be made out of it. Its functions block.

Sources: open(2) O_NOFOLLOW; rename(2); flock(2).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import orjson
import trio

from sandkasten.errors import Unauthorized
from sandkasten.model.keys import KEY_ID, KEY_NAME, Access, ApiKey, Label, Quota, id_of, is_token_of
from sandkasten.model.network import NetworkMode

log = logging.getLogger(__name__)

MAX_KEYS = 1000
LOOK_EVERY_S = 0.5
"""Period at which `KeyWatch` looks at the file."""

_MAX_BYTES = 1024 * 1024
_VERSION = 1
_MODE = 0o640
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_FIELDS = frozenset(attrs.fields_dict(ApiKey))
_LOCK_S = 5.0
_LOCK_PAUSE_S = 0.05


class KeyUse:
    """One request or connection: served inside `running`, on the key given to `bind` once the key is known."""

    def __init__(self, uses: dict[str, set[KeyUse]]) -> None:
        self._scope = trio.CancelScope()
        self._error: Exception | None = None
        self.key: ApiKey | None = None
        self._uses = uses

    def bind(self, key: ApiKey) -> None:
        """Serve on `key` from here on, while the key is in force."""
        self.key = key
        if key.digest:  # the configured key holds as long as the daemon
            self._uses.setdefault(key.id, set()).add(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Cancel the block and raise the error of `end` when that is called before the block ends."""
        try:
            with self._scope:
                yield
        finally:
            self.leave()
        if self._scope.cancelled_caught and self._error is not None:
            raise self._error

    def end(self, error: Exception) -> None:
        """Cancel what runs, which ends with `error` unless it has ended before: the key has ended, or the client has
        left. Never blocks, never raises."""
        self._error = self._error or error
        self._scope.cancel()

    @property
    def has_been_ended(self) -> bool:
        return self._error is not None

    def leave(self) -> None:
        """Stop using the key. Idempotent."""
        if self.key is not None and self.key.id in self._uses:
            self._uses[self.key.id].discard(self)
            if not self._uses[self.key.id]:
                del self._uses[self.key.id]


class KeyRing:
    """The API keys in force, and their uses. In memory."""

    def __init__(self) -> None:
        self._keys: dict[str, ApiKey] = {}
        self._uses: dict[str, set[KeyUse]] = {}
        self.last_used: dict[str, datetime] = {}
        self.trouble: str | None = None
        """The reason why the file of keys is not believed, None if it is."""

    @property
    def keys(self) -> Mapping[str, ApiKey]:
        """The keys by id, expired ones included."""
        return MappingProxyType(self._keys)

    def find(self, token: bytes) -> ApiKey | None:
        """Return the key in force with this token. Takes the same time for every wrong token.

        Raises:
            Unauthorized: the key has expired; only its holder learns so.
        """
        key_id = id_of(token)
        key = None if key_id is None else self._keys.get(key_id)
        is_right = is_token_of(key, token)
        now = datetime.now(UTC)
        if key is None or not is_right:
            return None
        if key.is_over(now):
            raise Unauthorized("this API key has expired")
        self.last_used[key.id] = now
        return key

    def in_force(self, key_id: str) -> ApiKey | None:
        """Return the key with this id, None if it was revoked or has expired."""
        key = self._keys.get(key_id)
        return None if key is None or key.is_over(datetime.now(UTC)) else key

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Put these keys in force, and end uses of those that are gone or changed."""
        self._keys = {key.id: key for key in keys}
        self.trouble = None
        self.last_used = {key_id: moment for key_id, moment in self.last_used.items() if key_id in self._keys}
        self.end_uses()

    def end_uses(self) -> None:
        """End the uses of keys that are gone, changed or over by now."""
        now = datetime.now(UTC)
        for key_id, uses in list(self._uses.items()):
            key = self._keys.get(key_id)
            for use in uses:
                if key is None or key.is_over(now) or use.key is None or not use.key.gives(key):
                    use.end(Unauthorized("the API key was revoked or has expired"))

    def use(self) -> KeyUse:
        """Return a new use, for one request or connection."""
        return KeyUse(self._uses)


# The file

Stamp = tuple[int, ...]
"""A value that differs after a file was replaced or written."""


class KeyFileError(Exception):
    """The file can't be believed or read; the message says why and quotes nothing of the file."""


def stamp_of(path: Path) -> Stamp:
    """Return the file's stamp, empty if there is no file. Raises `OSError`."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys; none if there is no file.

    Raises:
        KeyFileError: another user owns or may write the file, or `write_keys` did not write it.
        OSError: the file can't be read.
    """
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return []
    with open(fd, "rb") as file:
        _check_owner(os.fstat(fd))
        content = file.read(_MAX_BYTES + 1)
    if not content:
        return []
    try:
        return _decode(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KeyFileError(f"damaged ({type(error).__name__})") from error


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file; the directory's group may read it. Raises `OSError`."""
    content = orjson.dumps({"version": _VERSION, "keys": [_encode(key) for key in keys]}, option=orjson.OPT_INDENT_2)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchown(fd, -1, os.stat(path.parent).st_gid)
            os.fchmod(fd, _MODE)
            os.fsync(fd)  # before the rename: after a crash the name must not lead to an empty file
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


@contextlib.contextmanager
def locked_for_change(path: Path) -> Iterator[None]:
    """Keep other writers out between a read and a write.

    Raises:
        KeyFileError: another writer holds the lock for too long.
        OSError: the directory can't be opened.
    """
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KeyFileError("another command is changing the file") from None
                time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_owner(status: os.stat_result) -> None:
    """Refuse a file of another user. Root believes also a file of the daemon's user, which serves only that user."""
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise KeyFileError("not a plain file")
    if os.geteuid() not in (0, status.st_uid) and status.st_uid != 0:
        raise KeyFileError("owned by another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KeyFileError("other users may write the file; check its keys, then chmod 640")


def _encode(key: ApiKey) -> dict[str, Any]:  # JSON values
    return {
        "id": key.id,
        "name": key.name,
        "access": key.access.name.lower(),
        "label": None if key.label is None else attrs.asdict(key.label),
        "quota": {name: value for name, value in attrs.asdict(key.quota).items() if value is not None},
        "max_network": None if key.max_network is None else key.max_network.value,
        "created_at": _text(key.created_at),
        "expires_at": _text(key.expires_at),
        "digest": key.digest.hex(),
    }


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _decode(content: bytes) -> list[ApiKey]:
    """Return the keys. Raises ValueError, KeyError, TypeError or AttributeError unless `write_keys` wrote them."""
    if len(content) > _MAX_BYTES:
        raise ValueError("too long")
    value = orjson.loads(content)
    if value["version"] != _VERSION or len(value["keys"]) > MAX_KEYS:
        raise ValueError("of another version, or too many keys")
    keys = [_decode_key(each) for each in value["keys"]]
    if len({key.id for key in keys}) != len(keys) or len({key.name for key in keys}) != len(keys):
        raise ValueError("two keys have one id or one name")
    return keys


def _decode_key(value: Mapping[str, Any]) -> ApiKey:  # JSON values
    if not (KEY_ID.match(value["id"]) and KEY_NAME.match(value["name"]) and _DIGEST.match(value["digest"])):
        raise ValueError("id, name or digest is none")
    if not value.keys() <= _FIELDS:
        raise ValueError("a field that is none")  # it may be one that limits the key, misspelt
    if value["access"] not in ("read", "write", "admin"):
        raise ValueError("no such access")
    access = Access[value["access"].upper()]
    label = None if value["label"] is None else Label(**value["label"])
    if label is not None and (not isinstance(label.name, str) or not isinstance(label.value, str)):
        raise ValueError("no label")
    return ApiKey(
        id=value["id"],
        name=value["name"],
        access=access,
        label=label,
        quota=Quota(**value["quota"]),
        created_at=_moment(value["created_at"]),
        expires_at=_moment(value["expires_at"]),
        digest=bytes.fromhex(value["digest"]),
        max_network=None if (most := value.get("max_network")) is None else NetworkMode(most),  # older files have none
    )


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a time without its zone")
    return moment


class KeyWatch:
    """Keeps `ring` as the file at `path` says, so that a revoked key is over within a second.

    The file is looked at by its name and off the event loop: a disk that hangs delays changes and nothing else.
    """

    def __init__(self, ring: KeyRing, path: Path) -> None:
        self._ring, self._path = ring, path
        self._seen: Stamp | None = None
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the file at once, then whenever it changes."""
        await self.look()
        task_status.started()
        while True:
            await trio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Bring the ring up to date."""
        try:
            stamp = await trio.to_thread.run_sync(stamp_of, self._path, limiter=self._limiter)
            if stamp != self._seen:
                await self._read(stamp)
        except (KeyFileError, OSError) as error:
            self._refuse(error)
        self._ring.end_uses()

    async def _read(self, stamp: Stamp) -> None:
        self._seen = stamp
        keys = await trio.to_thread.run_sync(read_keys, self._path, limiter=self._limiter)
        before = self._ring.keys.keys()
        after = {key.id for key in keys}
        if before != after:
            facts = {"added": sorted(after - before), "removed": sorted(before - after), "keys": len(keys)}
            log.info("keys_changed", extra=facts)
        self._ring.replace(keys)

    def _refuse(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if self._ring.keys or self._ring.trouble != reason:
            log.error("keys_refused", extra={"file": self._path.name, "reason": reason})
        self._ring.replace([])
        self._ring.trouble = reason
        self._seen = None  # the file may become readable without a change of its stamp
