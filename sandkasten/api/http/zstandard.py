"""Zstandard over a stream of pieces, a bounded amount at a time, in a worker thread. Knows no archive and no HTTP.

Input is hostile: it may ask for a window of gigabytes, or hold a mebibyte in forty bytes. So windows are bounded, as
RFC 8878 §3.1.1.1.2 recommends (8 MiB at the least; `zstd --ultra` and `--long=27` use up to 128 MiB), and output is
taken in pieces of at most `PIECE_BYTES`.

Sources: RFC 8878; Python library reference, `compression.zstd`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import trio
from backports.zstd import DecompressionParameter, ZstdCompressor, ZstdDecompressor, ZstdError

from sandkasten.errors import InvalidRequest

MAGIC = b"\x28\xb5\x2f\xfd"
PIECE_BYTES = 256 * 1024
_WINDOW_LOG = 27
_LEVEL = 3
_THREADS = 2


class Zstandard:
    """The codec of one front; bounds the worker threads of all its requests together."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(_THREADS)

    async def compress(self, pieces: AsyncIterator[bytes], write: Callable[[bytes], Awaitable[None]]) -> bytes:
        """Write the compressed form of `pieces`, and return its last part instead of writing it."""
        compressor = ZstdCompressor(level=_LEVEL)
        buffer = bytearray()
        async for piece in pieces:
            buffer += piece
            if len(buffer) >= PIECE_BYTES:
                data, buffer = bytes(buffer), bytearray()
                if packed := await trio.to_thread.run_sync(compressor.compress, data, limiter=self._limiter):
                    await write(packed)
        data = bytes(buffer)
        return await trio.to_thread.run_sync(
            lambda: compressor.compress(data) + compressor.flush(), limiter=self._limiter
        )

    def decompressor(self) -> Decompressor:
        """Return a decompressor, which is fed piece by piece."""
        return Decompressor(self._limiter)


class Decompressor:
    """Decompresses one or several frames in a row. Raises `InvalidRequest` for malformed input."""

    def __init__(self, limiter: trio.CapacityLimiter) -> None:
        self._limiter = limiter
        self._decoder = _new_decoder()
        self._is_between = True

    async def feed(self, data: bytes, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Decompress `data` and write the result."""
        while True:
            if self._decoder.eof:
                data = self._decoder.unused_data
                self._decoder, self._is_between = _new_decoder(), True
                if not data:
                    return
            self._is_between = False
            try:
                piece = await trio.to_thread.run_sync(
                    self._decoder.decompress, data, PIECE_BYTES, limiter=self._limiter
                )
            except ZstdError:
                raise InvalidRequest("the archive can't be decompressed", body="is not valid zstd") from None
            data = b""
            if piece:
                await write(piece)
            if self._decoder.needs_input and not self._decoder.eof:
                return

    def finish(self) -> None:
        """Raise `InvalidRequest` unless the last frame is complete."""
        if not self._is_between and not self._decoder.eof:
            raise InvalidRequest("the archive can't be decompressed", body="ends too early")


def _new_decoder() -> ZstdDecompressor:
    return ZstdDecompressor(options={DecompressionParameter.window_log_max: _WINDOW_LOG})
