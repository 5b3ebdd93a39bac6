"""A descriptor that came with a request: open until it is taken or the request has begun.

Sources: unix(7) SCM_RIGHTS.
"""

from __future__ import annotations

import os


class Descriptor:
    """At most one descriptor, closed unless somebody takes it."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd

    def take(self) -> int | None:
        """Return the descriptor, which is the caller's from now on, or None if there is none."""
        fd, self._fd = self._fd, -1
        return fd if fd >= 0 else None

    def close(self) -> None:
        fd = self.take()
        if fd is not None:
            os.close(fd)
