"""A session as a sandbox of E2B: its tokens and signatures, its ports, its end, and what the operator set.

Nothing of tokens is stored. A token is the HMAC of a session's id by a key that only this node has, so that it is good
for that session alone, and for what E2B's API offers of one. A signed URL has no header and names no sandbox: its
signature is a digest of the path, the action, the user and the token.

The end is so many seconds from now, whatever goes on, and none while a sandbox is paused. So a session of this API has
no idle timeout, and a lifetime of its age and those seconds.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Literal

import attrs
import trio

from sandkasten.errors import (
    Conflict,
    Overloaded,
    PreviewNotFound,
    PreviewsOff,
    SessionExpired,
    SessionNotFound,
)
from sandkasten.model import Session, SessionPatch, Status
from sandkasten.model.network import EVERY_PORT, NetworkMode, SignedPreview
from sandkasten.model.session import FOREVER_S
from sandkasten.supervisor import Supervisor

INTERPRETER_TEMPLATE = "code-interpreter-v1"
"""The template that E2B's code interpreter SDK asks for when its user names none."""

ENVD_VERSION = "0.6.1"
"""Version that clients take for envd's, and choose their features by: from 0.6.2 on they send metadata of files."""


@attrs.frozen(kw_only=True)
class E2bTerms:
    """`key` seals tokens. `templates` are names of images by E2B's names of templates; other names are images' own, or
    `aliases` of such. `widest` is the most that a sandbox may reach. `max_idle_s` is the longest idle timeout, None
    without a bound, and so is `max_lifetime_s`. `has_ports`: the node serves previews.
    """

    key: bytes = attrs.field(repr=False)
    templates: Mapping[str, str] = attrs.field(factory=dict)
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    widest: NetworkMode = NetworkMode.OPEN
    max_idle_s: float | None = None
    max_lifetime_s: float | None = None
    has_ports: bool = False

    @property
    def longest_s(self) -> float:
        """The lifetime of a sandbox that has no end of its own."""
        return self.max_lifetime_s or FOREVER_S

    def has_kernel(self, image: str) -> bool:
        """Whether sandboxes of that image begin with a kernel, as those of the code interpreter's template do."""
        wanted = self.templates.get(INTERPRETER_TEMPLATE, INTERPRETER_TEMPLATE)
        return self.aliases.get(image, image) == self.aliases.get(wanted, wanted)


# Tokens ---------------------------------------------------------------------------------------------------------------

Action = Literal["read", "write"]


def access_token(key: bytes, session_id: str) -> str:
    """Return the token that opens a sandbox's `envd` API: a digest of the key and the session's id, so that no table is
    kept."""
    return hmac.digest(key, f"envd:{session_id}".encode(), hashlib.sha256).hex()


def is_token_of(key: bytes, session_id: str, token: str) -> bool:
    """Whether a token is that of the session, in the same time for every wrong one."""
    return is_same(access_token(key, session_id), token)


def is_same(token: str, given: str) -> bool:
    """Whether a client's token is the right one, in the same time for every wrong one."""
    return hmac.compare_digest(token.encode(), given.encode("utf-8", "replace"))


TRAFFIC_TOKEN = b"e2b-traffic-access-token"
"""The header with which a client may speak to ports of a sandbox, and to nothing else of it."""


def traffic_token(key: bytes, session_id: str) -> str:
    """Return the token for ports of a session, where its preview has none."""
    return hmac.digest(key, f"traffic:{session_id}".encode(), hashlib.sha256).hex()


SIGNATURE = re.compile(r"v1_[A-Za-z0-9+/]{43}")


def sign(path: str, action: Action, user: str, token: str, expiration: str | None) -> str:
    """Return the signature of a URL."""
    return _signature(_signed(path, action, user), token, expiration)


def _signed(path: str, action: Action, user: str) -> hashlib._Hash:
    """Return the digest of what stands before the token, which is the same for every sandbox."""
    return hashlib.sha256(":".join((path, action, user, "")).encode("utf-8", "surrogatepass"))


def _signature(before: hashlib._Hash, token: str, expiration: str | None) -> str:
    digest = before.copy()
    digest.update((token if expiration is None else f"{token}:{expiration}").encode("utf-8", "surrogatepass"))
    return "v1_" + base64.b64encode(digest.digest()).rstrip(b"=").decode("ascii")


def find_signer(
    key: bytes,
    session_ids: Iterable[str],
    signature: str,
    *,
    path: str,
    action: Action,
    user: str,
    expiration: str | None,
) -> str | None:
    """Return the session whose token signed a URL, None if there is none. Every session is compared with."""
    given, before = signature.encode("utf-8", "replace"), _signed(path, action, user)
    found = None
    for session_id in session_ids:
        right = _signature(before, access_token(key, session_id), expiration)
        if hmac.compare_digest(right.encode(), given):
            found = session_id
    return found


# Ports ----------------------------------------------------------------------------------------------------------------


async def find_ports(supervisor: Supervisor, session_id: str) -> SignedPreview | None:
    """Return the preview of every port of a session, None without one."""
    try:
        return await supervisor.find_preview(session_id, EVERY_PORT)
    except (PreviewNotFound, PreviewsOff, SessionNotFound, SessionExpired):
        return None


def domain_of(ports: SignedPreview) -> str:
    """Return what stands behind `PORT-ID.` in the names of ports."""
    return ports.url.partition("://")[2].rstrip("/").partition(".")[2]


# The end --------------------------------------------------------------------------------------------------------------

TIMEOUT_S = 300.0
"""Time of a sandbox whose client names none."""

_SHORTEST_S = 0.001
BOUND_S = 10.0
"""Longest time for which the end of a request whose client has left is put off."""

STILL_S = 20.0
"""Longest time for which a request waits while its sandbox stands still though nobody paused it."""
_LOOK_S = 0.1


def age_of(session: Session) -> float:
    """Return the seconds since a session was made."""
    return max((datetime.now(UTC) - session.created_at).total_seconds(), 0.0)


async def end_in(supervisor: Supervisor, session: Session, timeout_s: float) -> Session:
    """Have a session end in so many seconds. Raises `InvalidRequest` beyond the operator's longest lifetime."""
    return await supervisor.update(session.id, SessionPatch(max_lifetime_s=_lifetime_of(session, timeout_s)))


def _lifetime_of(session: Session, timeout_s: float) -> float:
    return max(age_of(session) + timeout_s, _SHORTEST_S)


@asynccontextmanager
async def another_end(supervisor: Supervisor, session: Session, lifetime_s: float) -> AsyncIterator[None]:
    """Give a session another lifetime, and the present one back where what follows fails. Raises `InvalidRequest`
    beyond the operator's longest lifetime."""
    await supervisor.update(session.id, SessionPatch(max_lifetime_s=lifetime_s))
    try:
        yield
    except BaseException:
        with trio.move_on_after(BOUND_S, shield=True):
            await supervisor.update(session.id, SessionPatch(max_lifetime_s=session.max_lifetime_s))
        raise


def is_paused(terms: E2bTerms, session: Session) -> bool:
    """Whether a sandbox is paused for its clients, and so has no end of its own. One that stands still for another
    reason, such as that an image is made of it, has its end."""
    return session.status is Status.PAUSED and session.max_lifetime_s >= terms.longest_s


async def wait_while_still(supervisor: Supervisor, session: Session) -> Session:
    """Return a session when it goes on. Raises `Overloaded` after `STILL_S`, `SessionNotFound`."""
    with trio.move_on_after(STILL_S):
        while session.status is Status.PAUSED:
            await trio.sleep(_LOOK_S)
            session = await supervisor.get(session.id)
        return session
    raise Overloaded(
        "the sandbox stands still, since an image is made of it or the server's own API paused it; try again"
    )


async def go_on(terms: E2bTerms, supervisor: Supervisor, session: Session, timeout_s: float = TIMEOUT_S) -> Session:
    """Resume a session that stands still. One that is paused for its clients ends in so many seconds from now, unless
    it can't be resumed. Raises `Overloaded` for one of which an image is made, if that takes longer than `STILL_S`."""
    try:
        if not is_paused(terms, session):
            return await supervisor.resume(session.id)
        async with another_end(supervisor, session, _lifetime_of(session, timeout_s)):
            return await supervisor.resume(session.id)
    except Conflict:
        return await wait_while_still(supervisor, session)
