"""Output stores for tests: opened, with their background task running, closed again."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import trio

from sandkasten.model import Output, Stream
from sandkasten.output.log import LogReader, OutputLog
from sandkasten.output.store import OutputStore, SessionOutput
from tests.waiting import until

KB = 1024
MB = 1024 * KB
PIECE = b"0123456789abcdef" * (4 * KB)
"""64 KiB."""


@asynccontextmanager
async def open_output(
    root: Path,
    *,
    memory_bytes: int = 64 * MB,
    session_bytes: int = 64 * MB,
    disk_bytes: int = 4096 * MB,
    retention_s: float = 900.0,
) -> AsyncIterator[OutputStore]:
    """A store at work."""
    store = OutputStore(
        root, memory_bytes=memory_bytes, session_bytes=session_bytes, disk_bytes=disk_bytes, retention_s=retention_s
    )
    await store.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        yield store
        nursery.cancel_scope.cancel()
    store.close()


async def fill(log: OutputLog, pieces: int, *, stream: Stream = Stream.STDOUT, data: bytes = PIECE) -> None:
    """Append the same piece several times."""
    for _ in range(pieces):
        await log.append(stream, data)


async def take(reader: LogReader, pieces: int) -> list[Output]:
    """Return the next pieces."""
    return [await anext(reader) for _ in range(pieces)]


async def drain(reader: LogReader) -> bytes:
    """Return all that is left, up to the end of the log, and close the reader."""
    try:
        return b"".join([piece.data async for piece in reader])
    finally:
        reader.close()


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `size_bytes` (setrlimit(2), RLIMIT_FSIZE): writes fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files(root: Path) -> list[Path]:
    return sorted(root.iterdir())


def contents(root: Path) -> Iterator[bytes]:
    """Yield what is in each file; one that is removed meanwhile is left out."""
    for path in files(root):
        with suppress(FileNotFoundError):
            yield path.read_bytes()


def disk_bytes(root: Path) -> int:
    return sum(len(content) for content in contents(root))


def numbered_piece(number: int) -> bytes:
    return b"%016d" % number * (4 * KB)


async def ended(logs: SessionOutput, exec_id: str, *, pieces: int) -> OutputLog:
    log = logs.open(exec_id)
    for number in range(pieces):
        await log.append(Stream.STDOUT, numbered_piece(number))
    logs.retire(exec_id)
    return log


async def wait_memory_below(store: OutputStore, limit_bytes: int) -> None:
    """Wait until memory holds no more than that, and nothing is being written."""

    async def is_at_rest() -> bool:
        is_below = store.memory_bytes_used <= limit_bytes and store._writing.borrowed_tokens == 0
        return is_below and store.disk_bytes_used == disk_bytes(store._root)

    await until(is_at_rest)
