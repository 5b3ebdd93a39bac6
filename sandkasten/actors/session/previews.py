"""The previews of one session: opened and closed by its actor, and closed when their time is over.

They are part of the session's record, which the gateway's questions are answered from (`actors/services/previews.py`);
a daemon that adopts the session goes on with them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import attrs
import trio

from egress.knocking import ALL_PORTS
from sandkasten.actors.core import Ref
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.actors.services.previews import CloseDoors, PublishPort
from sandkasten.actors.session.record import LiveRecord
from sandkasten.errors import Capacity, Conflict, PreviewNotFound, SandkastenError
from sandkasten.log import rfc3339
from sandkasten.model import EventType
from sandkasten.model.network import EVERY_PORT, MAX_PREVIEWS, Preview, PreviewAccess, PreviewSpec
from sandkasten.store.sessions import SessionRecord

log = logging.getLogger(__name__)

_EPOCH_BYTES = 8


class SessionPreviews:
    """See the module's docstring."""

    def __init__(self, host: SessionServices, own: LiveRecord, *, previews: Ref) -> None:
        self._host, self._own, self._client = host, own, previews

    async def open(self, spec: PreviewSpec) -> Preview:
        """Open a preview, in place of one that the port has. A port that is published and shall be stays so, with its
        connections, and has another end.

        Raises:
            Capacity: the session has too many, or the node.
            Conflict: the port of the node can't be had, or one kind of preview would take the place of the other.
            StoreFailed: it could not be recorded.
        """
        before, is_local, host_port = self._own.session.previews, spec.access is PreviewAccess.LOCAL, None
        replaced = before.get(spec.port)
        if replaced is None and len(before) >= MAX_PREVIEWS:
            raise Capacity("the session has too many previews", limit=MAX_PREVIEWS)
        if replaced is not None and is_local != (replaced.host_port is not None):
            raise Conflict("the port has a preview of the other kind: close that first", port=spec.port)
        if is_local:
            host_port = await self._client.ask_again(PublishPort(self._host.session_id, spec.port, spec.host_port))
        preview = _made(spec, host_port)
        if is_local and replaced is not None:
            preview = attrs.evolve(preview, epoch=replaced.epoch)
        is_recorded = False
        try:
            await self._put({**before, spec.port: preview})
            is_recorded = True
        finally:
            if not is_recorded and is_local and replaced is None:
                with trio.CancelScope(shield=True):
                    await self._revoke(spec.port)
        self._host.start_task(self._close_in_time, preview)
        if is_local and replaced is not None:
            return preview
        if replaced is not None:
            await self._revoke_own(spec.port)
        self._emit_opened(preview)
        return preview

    async def publish(self, wanted: Sequence[PreviewSpec]) -> None:
        """Open the previews of a session that is being made, all or none, before a record says that the session runs.

        Raises:
            Conflict, Capacity: a port of the node can't be had.
        """
        made: dict[int, Preview] = {}
        if not wanted:
            return
        try:
            for spec in wanted:
                host_port = None
                if spec.access is PreviewAccess.LOCAL:
                    port = PublishPort(self._host.session_id, spec.port, spec.host_port)
                    host_port = await self._client.ask_again(port)
                made[spec.port] = _made(spec, host_port)
        finally:
            if len(made) < len(wanted):
                with trio.CancelScope(shield=True):
                    await self._revoke()
        self._own.change(previews=made)

    async def undo(self, before: SessionRecord) -> None:
        """Put the record of a pool's member back, and listen for none of the ports that it was to have as a session:
        the next member is asked for them."""
        if self._own.session.previews:
            await self._revoke()
        self._own.undo(before)

    def announce(self) -> None:
        """Tell of the previews that a session was made with, and close them in time."""
        for preview in self._own.session.previews.values():
            self._host.start_task(self._close_in_time, preview)
            self._emit_opened(preview)

    async def close(self, port: int, reason: str = "closed by request") -> None:
        """Close a preview, and end the requests to it.

        Raises:
            PreviewNotFound: the port has none.
            StoreFailed: it could not be recorded; the preview stays.
        """
        before = self._own.session.previews
        if port not in before:
            raise PreviewNotFound("the port has no preview", port=port)
        await self._put({each: preview for each, preview in before.items() if each != port})
        await self._revoke_own(port)
        self._host.emit(EventType.PREVIEW_CLOSED, port=port, reason=reason)

    def adopt(self) -> None:
        """Go on with the previews of the record."""
        for preview in self._own.session.previews.values():
            self._host.start_task(self._close_in_time, preview)
            if preview.host_port is not None:
                self._host.start_task(self._publish_again, preview, preview.host_port)

    async def _publish_again(self, preview: Preview, host_port: int) -> None:
        try:
            await self._client.ask_again(PublishPort(self._host.session_id, preview.port, host_port))
        except SandkastenError as error:
            log.warning("not_published", extra={"session_id": self._host.session_id, "error": str(error)})
            await self._close_soon(preview, "its port of the node can't be had")

    async def _put(self, previews: Mapping[int, Preview]) -> None:
        before = self._own.session.previews
        self._own.change(previews=previews)
        try:
            await self._own.put()
        except SandkastenError:
            self._own.change(previews=before)
            raise

    def _emit_opened(self, preview: Preview) -> None:
        self._host.emit(
            EventType.PREVIEW_OPENED,
            port=preview.port,
            access=preview.access.value,
            expires_at=rfc3339(preview.expires_at),
            host_port=preview.host_port,
        )

    async def _revoke_own(self, port: int) -> None:
        """End requests of one preview that are under way: ports that have one are not of that of every port."""
        await self._revoke(port, tuple(self._own.session.previews) if port == EVERY_PORT else ())

    async def _revoke(self, port: int = ALL_PORTS, kept: tuple[int, ...] = ()) -> None:
        """End requests that are under way. Without a client none are."""
        try:
            await self._client.ask_again(CloseDoors(self._host.session_id, port, kept))
        except SandkastenError as error:
            log.warning("preview_not_revoked", extra={"session_id": self._host.session_id, "error": str(error)})

    async def _close_in_time(self, preview: Preview) -> None:
        await trio.sleep(max((preview.expires_at - datetime.now(UTC)).total_seconds(), 0))
        await self._close_soon(preview, "its time was over")

    async def _close_soon(self, preview: Preview, reason: str) -> None:
        if self._own.session.previews.get(preview.port) == preview:
            try:
                await self.close(preview.port, reason)
            except SandkastenError as error:  # the record keeps one that lets nobody in
                log.info("preview_not_closed", extra={"session_id": self._host.session_id, "error": str(error)})


def _made(spec: PreviewSpec, host_port: int | None) -> Preview:
    end = datetime.now(UTC) + timedelta(seconds=spec.ttl_s)
    epoch = secrets.token_hex(_EPOCH_BYTES)
    return Preview(spec.port, spec.access, epoch, end, spec.keep_alive, spec.resume, host_port)
