"""File descriptors with an owner: closed exactly once."""

from __future__ import annotations

import os
from types import TracebackType


class OwnedFd:
    """A descriptor that its holder must close; a second close is harmless."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def fileno(self) -> int:
        """Return the descriptor number. Raises `ValueError` after `close`."""
        if self._fd is None:
            raise ValueError("descriptor is closed")
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> OwnedFd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
