"""Downloads of blobs into files that are verified while they come, and go on after a break.

A blob is `blobs/<digest>.part`, locked by the process that loads or uses it, and removed once its layer is unpacked.
What a broken download left is hashed again before the rest is asked for, so a file that was changed meanwhile, or was
lost in part with the machine, is found out. No more bytes are taken than the manifest says.

Sources: RFC 9110 §14 (ranges); flock(2).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import attrs
import trio

from sandkasten.errors import DigestMismatch, DiskFull, DiskReserve, RegistryRefused, TooLarge
from sandkasten.images.registry.documents import Blob

if TYPE_CHECKING:  # a daemon that pulls nothing does not load what speaks HTTP
    from sandkasten.images.registry.client import RegistryAnswer, RegistryClient

_PART = re.compile(r"[0-9a-f]{64}\.part\Z")
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_BYTES = 1 << 20
_LOOK_BYTES = 64 << 20
_PROGRESS_BYTES = 64 << 10
_LOCK_PAUSE_S = 0.2
_NO_SUCH_RANGE = 416
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15}|\*)\Z")

OnBytes = Callable[[int], None]
IsNeeded = Callable[[], Awaitable[bool]]


class Blobs:
    """The directory of blobs. `floor_bytes`: what the disk has to have left at all times."""

    def __init__(self, directory: Path, *, floor_bytes: int = 0) -> None:
        self._directory, self._floor_bytes = directory, floor_bytes
        self._limiter = trio.CapacityLimiter(3)

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove broken downloads that nobody went on with for so long; return their number, and their bytes. With
        `dry_run` they stay."""
        count = size_bytes = 0
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in self._directory.iterdir():
            if not _PART.match(path.name):
                continue
            with contextlib.suppress(OSError):  # another process has removed it, or it is no file
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    found = os.fstat(fd)
                    if time.time() - found.st_mtime >= older_than_s and _is_locked(fd):
                        if not dry_run:
                            path.unlink()
                        count, size_bytes = count + 1, size_bytes + found.st_size
                finally:
                    os.close(fd)
        return count, size_bytes

    def drop(self, blob: Blob) -> None:
        """Remove what came of a blob, unless somebody has it."""
        path = self._path(blob)
        try:
            fd = os.open(path, _FILE & ~os.O_CREAT)
        except FileNotFoundError:
            return
        try:
            if _is_locked(fd):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _path(self, blob: Blob) -> Path:
        return self._directory / f"{blob.digest.removeprefix('sha256:')}.part"

    def unnamed(self) -> IO[bytes]:
        """Make a file without a name, which goes when it is closed."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        return tempfile.TemporaryFile(buffering=0, dir=self._directory)

    async def spool(self, read: Callable[[], Awaitable[bytes]], most: int) -> IO[bytes]:
        """Write what is read, up to an empty piece, to a file without a name, and return that.

        Raises:
            TooLarge: there are more bytes than `most`.
            DiskReserve, DiskFull: the disk has no room for them.
        """
        have = 0
        file = await trio.to_thread.run_sync(self.unnamed)
        try:
            while piece := await read():
                have = await trio.to_thread.run_sync(self.append, file, piece, have, most, limiter=self._limiter)
        except BaseException:
            file.close()
            raise
        return file

    def append(self, file: IO[bytes], piece: bytes, have: int, most: int) -> int:
        """Write a piece to a file that has `have` bytes; return how many it has then. Raises as `spool`."""
        size = have + len(piece)
        if size > most:
            raise TooLarge(f"the archive has more than {most} bytes", limit=most)
        if not have or have // _LOOK_BYTES != size // _LOOK_BYTES:
            self.require_room(_LOOK_BYTES)
        write_at(file.fileno(), piece, have)
        return size

    def require_room(self, size: int) -> None:
        """Raise `DiskReserve` unless there is room for so many bytes."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        found = os.statvfs(self._directory)
        free = found.f_bavail * found.f_frsize
        if free < size + self._floor_bytes:
            raise DiskReserve(
                "the disk has no room for that", free_bytes=free, needed_bytes=size, reserve_bytes=self._floor_bytes
            )

    @contextlib.asynccontextmanager
    async def loaded(
        self, client: RegistryClient, repository: str, blob: Blob, on_bytes: OnBytes, is_needed: IsNeeded
    ) -> AsyncIterator[int | None]:
        """Load a blob, unless it is there, and yield a descriptor of it, at its beginning; None if it is not needed any
        more once this process has its file. `on_bytes` is told how many bytes there are. The file goes when the context
        is left without an error, and stays for a resume otherwise.

        Raises:
            DigestMismatch: what came is not the blob; nothing of it is kept.
            DiskReserve, DiskFull, RegistryRefused, RegistryUnauthorized.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        path = self._path(blob)
        fd = await _open_locked(path)
        is_over = False
        try:
            if not await is_needed():
                yield None
                is_over = True
                return
            try:
                await _Download(fd, blob, self, on_bytes, self._limiter).run(client, repository)
            except DigestMismatch:
                is_over = True
                raise
            os.lseek(fd, 0, os.SEEK_SET)
            yield fd
            is_over = True
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_close, fd, path if is_over else None)


def write_at(fd: int, data: bytes | bytearray, at: int) -> None:
    """Write all of `data` into a file, from a place on. Raises `DiskFull`."""
    left = memoryview(data)
    try:
        while left:
            count = os.pwrite(fd, left, at)
            left, at = left[count:], at + count
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull("there is no room for the image on the disk") from error
        raise


def _close(fd: int, path: Path | None) -> None:
    """Close a file, and remove it where it has a path: the blocks of some gigabytes are freed in seconds."""
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)


async def _open_locked(path: Path) -> int:
    """Open a file for this process alone; another that loads the same blob ends first."""
    while True:
        fd = os.open(path, _FILE, 0o600)
        if _is_locked(fd):
            try:
                if os.stat(path).st_ino == os.fstat(fd).st_ino:  # else it was removed since
                    return fd
            except FileNotFoundError:
                pass
        os.close(fd)
        await trio.sleep(_LOCK_PAUSE_S)


def _is_locked(fd: int) -> bool:
    """Lock a file, if nobody else has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@attrs.define
class _Download:
    """One blob on its way into a file: `done` bytes are there, and in `digest`."""

    fd: int
    blob: Blob
    blobs: Blobs
    on_bytes: OnBytes
    limiter: trio.CapacityLimiter
    done: int = 0
    digest: hashlib._Hash = attrs.field(factory=hashlib.sha256)

    async def run(self, client: RegistryClient, repository: str) -> None:
        """Load until the blob is whole and has its digest. If the digest is another, and some of the bytes are from an
        earlier download or from a mirror, load the blob once more, from the registry alone.

        Raises:
            DigestMismatch: the registry sends another blob.
        """
        is_pure = await trio.to_thread.run_sync(self._read_again, limiter=self.limiter) == 0 and not client.has_mirrors
        self.on_bytes(self.done)
        await self._load(client, repository, by_mirrors=True)
        if not self._is_whole() and not is_pure:
            await self._start_over()
            await self._load(client, repository, by_mirrors=False)
        if not self._is_whole():
            raise DigestMismatch(f"the registry sends another blob as {self.blob.digest}", digest=self.blob.digest)

    def _is_whole(self) -> bool:
        return self.done == self.blob.size and f"sha256:{self.digest.hexdigest()}" == self.blob.digest

    async def _load(self, client: RegistryClient, repository: str, *, by_mirrors: bool) -> None:
        """Load all bytes. Tries that bring much are not counted."""
        while self.done < self.blob.size:
            before = self.done
            try:
                await client.read_blob(repository, self.blob.digest, self._headers, self._take, by_mirrors=by_mirrors)
            except RegistryRefused as error:
                if error.details.get("status") == _NO_SUCH_RANGE and before:
                    return  # the file does not fit this blob
                if not error.retryable or self.done - before < _PROGRESS_BYTES:
                    raise

    def _headers(self) -> Mapping[str, str]:
        return {"range": f"bytes={self.done}-"} if self.done else {}

    async def _take(self, answer: RegistryAnswer) -> None:
        """Take the bytes of one answer."""
        if self.done and not (answer.status == 206 and self._is_right_part(answer)):
            await self._start_over()
            if answer.status == 206:  # another part than was asked for: the next try asks for all
                raise RegistryRefused(f"the registry sends another part of {self.blob.digest}")
        length = answer.headers.get("content-length", "")
        if length.isdigit() and int(length) > self.blob.size - self.done:
            raise self._too_long()
        waiting = bytearray()
        try:
            while piece := await answer.read():
                waiting += piece
                if self.done + len(waiting) > self.blob.size:
                    raise self._too_long()
                if len(waiting) >= _WRITE_BYTES:
                    await self._write(waiting)
                    waiting = bytearray()
        finally:
            with trio.CancelScope(shield=True):
                if self.done + len(waiting) <= self.blob.size:
                    await self._write(waiting)
        if self.done < self.blob.size:
            raise RegistryRefused(f"the registry sends {self.done} of the {self.blob.size} bytes of {self.blob.digest}")

    def _is_right_part(self, answer: RegistryAnswer) -> bool:
        match = _CONTENT_RANGE.match(answer.headers.get("content-range", ""))
        return match is not None and int(match[1]) == self.done and match[3] in ("*", str(self.blob.size))

    def _too_long(self) -> DigestMismatch:
        return DigestMismatch(
            f"the registry sends more than the {self.blob.size} bytes of {self.blob.digest}", digest=self.blob.digest
        )

    async def _write(self, data: bytearray) -> None:
        if data:
            if self.done // _LOOK_BYTES != (self.done + len(data)) // _LOOK_BYTES:
                self.blobs.require_room(0)
            await trio.to_thread.run_sync(self._append, data, limiter=self.limiter)
            self.on_bytes(self.done)

    def _append(self, data: bytearray) -> None:
        write_at(self.fd, data, self.done)
        self.digest.update(data)
        self.done += len(data)

    def _read_again(self) -> int:
        """Hash what an earlier download left; return its size."""
        if os.fstat(self.fd).st_size > self.blob.size:
            os.ftruncate(self.fd, 0)
        while data := os.pread(self.fd, _WRITE_BYTES, self.done):
            self.digest.update(data)
            self.done += len(data)
        return self.done

    async def _start_over(self) -> None:
        await trio.to_thread.run_sync(os.ftruncate, self.fd, 0, limiter=self.limiter)
        self.done, self.digest = 0, hashlib.sha256()
