"""Values of a preview: a port inside a session that is reached over HTTP from outside, for some time."""

from __future__ import annotations

import enum
from datetime import datetime

import attrs

PORT_BOUNDS = (1, 65535)
PREVIEW_TTL_BOUNDS_S = (1, 86_400)
"""Seconds for which a preview may hold."""

MAX_PREVIEWS = 16
"""Most previews of one session."""


class PreviewAccess(enum.StrEnum):
    """Access to a preview: for whoever has its token, or for whoever knows its name."""

    TOKEN = "token"
    PUBLIC = "public"


@attrs.frozen
class PreviewSpec:
    """A preview to open. `keep_alive`: each request counts as a use of the session, whose idle end it puts off."""

    port: int
    ttl_s: int = 3600
    access: PreviewAccess = PreviewAccess.TOKEN
    keep_alive: bool = False


@attrs.frozen
class Preview:
    """An open preview. `epoch` is new with each opening, so that tokens of an earlier one are void."""

    port: int
    access: PreviewAccess
    epoch: str
    expires_at: datetime
    keep_alive: bool = False


@attrs.frozen
class SignedPreview:
    """A preview with its URL and its token; the token is None where none is needed."""

    preview: Preview
    url: str
    token: str | None
