"""Crash points: the daemon ends itself at a named step, for tests of the next start. Off unless configured.

`testing.crash_at` names a point of this process, of an import, or of nsinit's processes, which are told theirs. The
setting needs `testing.crash_points`, which the configuration refuses to a daemon that others can reach.
"""

from __future__ import annotations

import enum
import os
import signal


class Point(enum.StrEnum):
    """Steps at which this process can end. Each is passed when its work is done and before its caller is answered."""

    CREATE_RECORDED = "daemon.create.recorded"
    CREATE_BUILT = "daemon.create.built"
    CREATE_RUNNING = "daemon.create.running_recorded"
    CREATE_SET_UP = "daemon.create.set_up"
    CREATE_READY = "daemon.create.ready"
    CLAIM_THAWED = "daemon.claim.thawed"
    CLAIM_HANDED_OVER = "daemon.claim.handed_over"
    CLAIM_RECORDED = "daemon.claim.recorded"
    EXEC_ACCEPTED = "daemon.exec.accepted"
    EXEC_STARTED = "daemon.exec.started"
    EXEC_ENDED = "daemon.exec.ended"
    DESTROY_RECORDED = "daemon.destroy.recorded"
    DESTROY_TORN_DOWN = "daemon.destroy.torn_down"
    DESTROY_WRITTEN = "daemon.destroy.written"
    WORKSPACE_RECORDED = "daemon.workspace.recorded"
    WORKSPACE_MADE = "daemon.workspace.made"
    WORKSPACE_PUBLISHED = "daemon.workspace.published"
    WORKSPACE_DISCARDED = "daemon.workspace.discarded"
    FILES_BUILT = "daemon.files.built"
    FILES_TORN_DOWN = "daemon.files.torn_down"
    IMPORT_BEGUN = "import.begun"
    IMPORT_UNPACKED = "import.unpacked"
    IMPORT_CHECKED = "import.checked"
    IMPORT_PUBLISHED = "import.published"
    COMMIT_PACKED = "image.commit.packed"
    PULL_BEGUN = "image.pull.begun"
    PULL_BLOB = "image.pull.blob"
    PULL_NAMED = "image.pull.layer.named"
    PULL_PUBLISHED = "image.pull.published"


_OWN = frozenset(point.value for point in Point)


class Crash:
    """The point to end at: `name`, or `name:N` for the N-th time; empty for none."""

    def __init__(self, at: str = "") -> None:
        self._at = at
        self._name, _, count = at.partition(":")
        self._left = int(count or 1)

    def passing(self, point: Point) -> None:
        """End this process if `point` is the configured one."""
        if self._name and point.value == self._name:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def take_foreign(self) -> str:
        """Return the point for nsinit, once: an nsinit that is started after the crash must live."""
        if self._name in _OWN:
            return ""
        at, self._at = self._at, ""
        return at
