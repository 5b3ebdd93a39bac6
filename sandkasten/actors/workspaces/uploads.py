"""The end of uploads that nobody goes on with: their part files are removed after a day.

`LocalFiles` (`files.py`) begins and ends uploads; a row of the store tells of each part file. A session's part files go
with the session, but for those in its workspace.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import attrs
import trio

from runner.wire.protocol import Done, DropUpload
from sandkasten.actors.core import Ref
from sandkasten.actors.services.store import do
from sandkasten.actors.workspaces.files import LocalFiles
from sandkasten.errors import SandkastenError, SessionExpired, SessionNotFound, WorkspaceNotFound
from sandkasten.model.workspace import UPLOAD_S, Upload
from sandkasten.store.uploads import end_upload, old_uploads

log = logging.getLogger(__name__)

WORKSPACE_PLACE = "workspace/"
"""Begin of the place of an upload into a workspace; that of one into a session is the session's id."""

SWEEP_S = 3600.0
_TRIES = 24
_GONE = (SessionNotFound, SessionExpired, WorkspaceNotFound)
_TOP = "/workspace/"

FilesAt = Callable[[str], Awaitable[LocalFiles | None]]
"""Returns the files at a place; None while they should be left alone."""


async def sweep_uploads(store: Ref, files_at: FilesAt, *, task_status: trio.TaskStatus[None]) -> None:
    """Remove what is left of old uploads, every hour, for ever."""
    task_status.started()
    while True:
        try:
            await sweep_once(store, files_at, datetime.now(UTC))
        except SandkastenError as error:
            log.warning("uploads_not_swept", extra={"error": str(error)})
        await trio.sleep(SWEEP_S)


async def sweep_once(store: Ref, files_at: FilesAt, now: datetime) -> None:
    """Remove what is left of uploads that are too old at a moment. One that can't be removed is tried for a day."""
    before = now - timedelta(seconds=UPLOAD_S)
    for place, upload in await store.ask_again(do(old_uploads, before)):
        is_last = upload.begun_at < before - timedelta(seconds=_TRIES * SWEEP_S)
        if await _is_dropped(files_at, place, upload) or is_last:
            await store.ask_again(do(end_upload, upload.id))


async def _is_dropped(files_at: FilesAt, place: str, upload: Upload) -> bool:
    try:
        found = await files_at(place)
        if found is None:
            return False
        await found.ask(DropUpload(upload.spec.path, upload.id, user=upload.spec.user), Done)
    except _GONE:
        spec = upload.spec
        if spec.workspace_id is None or not posixpath.join(_TOP, spec.path).startswith(_TOP):
            return True
        place = f"{WORKSPACE_PLACE}{spec.workspace_id}"
        for user in (None, "root"):  # whose directory it is in is not known, and there are no other users
            kept = attrs.evolve(upload, spec=attrs.evolve(spec, user=user, workspace_id=None))
            if await _is_dropped(files_at, place, kept):
                return True
        return False
    except SandkastenError as error:
        log.info("upload_left", extra={"place": place, "upload_id": upload.id, "error": str(error)})
        return False
    return True
