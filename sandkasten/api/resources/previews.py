"""Previews of a session: ports inside that are reached from outside."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.resources.fields import add_kinds, member_of, read_request
from sandkasten.api.resources.network import HostPort, PreviewPort, PreviewTtl
from sandkasten.api.resources.sessions import DoneBody
from sandkasten.errors import PreviewNotFound
from sandkasten.log import rfc3339
from sandkasten.model.network import PORT_BOUNDS, Preview, PreviewAccess, PreviewSpec

add_kinds({PreviewAccess: member_of(PreviewAccess)})


@attrs.frozen
class PreviewRequest:
    """A preview to open, of a port, or with 0 of every port that has none of its own: for `ttl_seconds`, by default an
    hour. With `keep_alive` its requests put off the session's idle end, with `resume` they end a pause. With the access
    `local` it is plain TCP on `host_port` of the node's `preview.publish`, by default any free one."""

    port: PreviewPort
    ttl_seconds: PreviewTtl | None = None
    access: PreviewAccess | None = None
    keep_alive: bool = False
    resume: bool = False
    host_port: HostPort | None = None

    def to_spec(self) -> PreviewSpec:
        """Return the model's spec."""
        asked = {"ttl_s": self.ttl_seconds, "access": self.access, "host_port": self.host_port}
        given = {name: value for name, value in asked.items() if value is not None}
        return PreviewSpec(self.port, keep_alive=self.keep_alive, resume=self.resume, **given)  # type: ignore[arg-type]


@attrs.frozen(kw_only=True)
class PreviewBody(Body):
    """An open preview. `host_port` is null unless the access is `local`."""

    port: int
    access: PreviewAccess
    expires_at: str
    keep_alive: bool
    resume: bool
    host_port: int | None


@attrs.frozen(kw_only=True)
class OpenedPreviewBody(PreviewBody):
    """A preview that was just opened. `token` is told this once; null where none is needed."""

    url: str
    token: str | None


@attrs.frozen(kw_only=True)
class PreviewsBody(Body):
    """The open previews of a session."""

    previews: Sequence[PreviewBody]


async def open_preview(exchange: Exchange) -> Answer:
    """Open a preview of a port, in place of one that the port has."""
    request = await read_request(exchange, PreviewRequest)
    signed = await exchange.supervisor.open_preview(exchange.session_id, request.to_spec())
    body = OpenedPreviewBody.take(
        signed.preview, expires_at=rfc3339(signed.preview.expires_at), url=signed.url, token=signed.token
    )
    return json_answer(body, status=201)


async def list_previews(exchange: Exchange) -> Answer:
    """List the open previews of a session."""
    found = await exchange.supervisor.previews(exchange.session_id)
    return json_answer(PreviewsBody(previews=[_body_of(each) for each in found]))


async def close_preview(exchange: Exchange) -> Answer:
    """Close a preview and end the requests to it."""
    text = exchange.params["port"]
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(PORT_BOUNDS[1])):
        raise PreviewNotFound("the port has no preview", port=text[:32])
    await exchange.supervisor.close_preview(exchange.session_id, int(text))
    return json_answer(DoneBody())


def _body_of(preview: Preview) -> PreviewBody:
    return PreviewBody.take(preview, expires_at=rfc3339(preview.expires_at))
