"""The disk of a running session as its actor sees it: how full it is, and other limits for it. Asks nsinit for both.

Knows no record: what the session's actor does with the answer is its own.
"""

from __future__ import annotations

import errno
import logging

from sandkasten.actors.core import Ref
from sandkasten.actors.services import nsinit_messages as zygote
from sandkasten.admission.plan import check_disk_limits, plan_disk
from sandkasten.config import Disk
from sandkasten.model import Limits
from sandkasten.model.errors import BuildFailed, InvalidRequest, Unavailable

log = logging.getLogger(__name__)


async def change_disk(ref: Ref, session_id: str, *, before: Limits, after: Limits, allowed: Disk) -> None:
    """Let the disk limits of `after` hold; nothing is asked of nsinit if they are those of `before`.

    Raises:
        InvalidRequest: more than any session may have, or disks keep their size here.
    """
    if plan_disk(before) == plan_disk(after):
        return
    check_disk_limits(after, allowed)
    try:
        await ref.ask(zygote.SetDisk(session_id, plan_disk(after)))
    except BuildFailed as error:
        if error.errno == errno.EOPNOTSUPP:
            message = "the disk of a running session keeps its size on this node"
            raise InvalidRequest(message, limits="disk_mb and disk_inodes can't change") from error
        raise


async def read_disk(ref: Ref, session_id: str) -> dict[str, int]:
    """Return what is known of the disk for a session's statistics; nothing while nsinit can't be asked."""
    try:
        use = await ref.ask(zygote.AskDisk(session_id))
    except (BuildFailed, Unavailable) as error:
        log.info("disk_not_read", extra={"session_id": session_id, "error": str(error)})
        return {}
    numbers = {
        "disk_bytes": use.used_bytes,
        "disk_limit_bytes": use.limit_bytes,
        "disk_inodes": use.used_inodes,
        "disk_inodes_limit": use.limit_inodes,
    }
    return {name: number for name, number in numbers.items() if number >= 0}
