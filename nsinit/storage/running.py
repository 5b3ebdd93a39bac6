"""The disk of a session that exists already, whoever built it: how full it is, and the beginning of its end.

Knows of the session what its cgroup tells, and nothing else.
"""

from __future__ import annotations

import os

from nsinit.cgroup.identity import open_root, require_identity
from nsinit.cgroup.session import SessionCgroup
from nsinit.log import log
from nsinit.steps import failure_of
from nsinit.storage.mechanism import CHANGE, Mechanism, Place, Usage
from nsinit.storage.paths import Layout
from nsinit.wire.protocol import DiskLimits


def usage(mechanism: Mechanism, layout: Layout, cgroup: SessionCgroup, session_id: str) -> Usage:
    """Return what is counted. Raises `StepFailed` when nothing of the session runs."""
    try:
        root_fd = open_root(require_identity(cgroup, "disk"))
        try:
            return mechanism.usage(Place(layout, session_id), root_fd)
        finally:
            os.close(root_fd)
    except OSError as error:
        raise failure_of("disk", error) from error


def change(mechanism: Mechanism, layout: Layout, session_id: str, limits: DiskLimits) -> None:
    """Let other limits hold. Raises `StepFailed`, and then the old ones do."""
    try:
        mechanism.change(Place(layout, session_id), limits)
    except OSError as error:
        raise failure_of(CHANGE, error) from error


def abandon(mechanism: Mechanism, layout: Layout, session_id: str) -> None:
    """Say that nobody will need what the session wrote."""
    try:
        mechanism.abandon(Place(layout, session_id))
    except OSError as error:  # then the end takes longer
        log("warning", "disk not abandoned", session_id, reason=str(error))
