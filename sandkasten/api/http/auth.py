"""Authentication and authorisation: whose request it is, and what that key may do. Reads headers only.

A key is the configured one or one of the ring's (`admission/keys.py`). Without a key the daemon listens on loopback or
a unix socket alone, where a browser of the user reaches it too: a foreign page could post to it, or rebind its own name
to 127.0.0.1. So `Host` must then be a loopback name, and `Origin`, if sent, our own (RFC 6454 §7). A unix socket is out
of a browser's reach.

Every route says in the table what it needs of the key; there is no default. For a key with a label everything without
the label does not exist: 404, as for an id that was never given.

Refusals are throttled. A token has too many bits to be found by trying, so the bound is on the work and the log lines
that strangers cause: each refusal over the rate waits, and holds nothing but its own connection, of which there are
`max_connections`. A request with a right key never waits. No address is locked out: behind a proxy all have the same.
"""

from __future__ import annotations

import enum
import hmac
import ipaddress
import logging
import math
from typing import assert_never

import attrs
import trio

from sandkasten.admission.keys import KeyRing
from sandkasten.admission.quotas import KeyShares, TokenBucket
from sandkasten.api.http.guard import Scope
from sandkasten.errors import Forbidden, PermissionDenied, SessionNotFound, Unauthorized
from sandkasten.model import SESSION_ID
from sandkasten.model.keys import CONFIGURED, LOCAL, Access, ApiKey, digest_of
from sandkasten.supervisor import Supervisor


class Gate:
    """Finds the key of a request. Of `api_key`, the configured key, only a digest is kept. None: no key is needed."""

    def __init__(self, api_key: str | None, ring: KeyRing) -> None:
        self._digest = None if api_key is None else digest_of(api_key.encode())
        self._ring = ring

    @property
    def is_key_needed(self) -> bool:
        """Whether requests need a key."""
        return self._digest is not None

    def check(self, scope: Scope) -> ApiKey:
        """Return the key of a request, or raise `Unauthorized`."""
        headers = _headers(scope)
        if self._digest is not None:
            return self._check_bearer(headers.get(b"authorization", []))
        if scope.get("server") is not None:  # hypercorn gives a unix socket no address
            _check_is_local(headers)
        return LOCAL

    def check_key(self, token: bytes) -> ApiKey:
        """Return the key with a token, or raise `Unauthorized`. Every wrong token takes the same time."""
        if (key := self._find(token)) is None:
            raise Unauthorized("no such API key: it was never made, or it has been revoked")
        return key

    def _find(self, token: bytes) -> ApiKey | None:
        if self._digest is None:
            return None
        found = self._ring.find(token)
        return CONFIGURED if hmac.compare_digest(digest_of(token), self._digest) else found

    def is_key_missing(self, scope: Scope) -> bool:
        """Return whether a key is needed and the request's head has none."""
        return self._digest is not None and not any(name == b"authorization" for name, _ in scope["headers"])

    def check_origin(self, scope: Scope, *, allowed: tuple[str, ...]) -> None:
        """Refuse a WebSocket of a foreign origin: a browser opens one for any page, with the cookies it has for us, and
        only tells where the page is from (RFC 6455 §10.2). Without a configured key `check` is stricter.

        Raises:
            PermissionDenied: a page of another origin asks.
        """
        headers = _headers(scope)
        hosts = headers.get(b"host", [])
        own = {scheme + host for host in hosts for scheme in (b"http://", b"https://")}
        for origin in headers.get(b"origin", []):
            if self._digest is not None and origin not in own and origin.decode("latin-1") not in allowed:
                raise PermissionDenied("this web origin may not open a WebSocket; see allowed_origins")

    def _check_bearer(self, values: list[bytes]) -> ApiKey:
        if not values:
            raise Unauthorized("no API key: send it as 'Authorization: Bearer <key>'")
        scheme, _, token = values[0].partition(b" ")
        if len(values) > 1 or scheme.lower() != b"bearer":
            raise Unauthorized("the API key is not sent as one 'Authorization: Bearer <key>'")
        return self.check_key(token.strip())


def _headers(scope: Scope) -> dict[bytes, list[bytes]]:
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(bytes(name), []).append(bytes(value))
    return headers


def _check_is_local(headers: dict[bytes, list[bytes]]) -> None:
    hosts = headers.get(b"host", [])
    if len(hosts) != 1 or not is_loopback_host(hosts[0].decode("latin-1")):
        raise Unauthorized("without an API key only a loopback host name is answered; set a key to allow others")
    for origin in headers.get(b"origin", []):
        if origin not in (b"http://" + hosts[0], b"https://" + hosts[0]):
            raise Unauthorized("without an API key no other web origin is answered; set a key to allow it")
    if any(site in (b"cross-site", b"same-site") for site in headers.get(b"sec-fetch-site", [])):
        raise Unauthorized("without an API key no other web site is answered; set a key to allow it")


def is_loopback_host(host: str) -> bool:
    """Return whether a `Host` header's value names this machine's loopback."""
    name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    if port and not port.isdigit():
        return False
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class Reach(enum.Enum):
    """The extent of a route, which decides where a key with a label is kept within its label.

    SESSION: the session in the path, checked here. FILTERED: things that the handler finds or makes, checked by the
    handler (`key_scope.py`). NODE: everything; refused to a key with a label. PUBLIC: nothing; no key is needed.
    """

    SESSION = enum.auto()
    FILTERED = enum.auto()
    NODE = enum.auto()
    PUBLIC = enum.auto()


@attrs.frozen
class Needs:
    """The access and reach that a route needs of the key."""

    access: Access
    reach: Reach


LOOK = Needs(Access.READ, Reach.SESSION)
ACT = Needs(Access.WRITE, Reach.SESSION)
FIND = Needs(Access.READ, Reach.FILTERED)
MAKE = Needs(Access.WRITE, Reach.FILTERED)
SEE_NODE = Needs(Access.READ, Reach.NODE)
RULE_NODE = Needs(Access.ADMIN, Reach.NODE)
OPEN = Needs(Access.NONE, Reach.PUBLIC)


async def admit(key: ApiKey, needs: Needs, supervisor: Supervisor, *, session_id: str) -> None:
    """Check that a key may use a route.

    Raises:
        Forbidden: the key has less access than the route needs.
        SessionNotFound: there is no such session within the key's reach.
    """
    if key.access < needs.access:
        raise Forbidden("this API key may not do that", needs=needs.access.name.lower(), has=key.access.name.lower())
    if key.label is None:
        return
    match needs.reach:
        case Reach.SESSION:
            await _require_session(key, supervisor, session_id)
        case Reach.NODE:
            raise Forbidden("this API key is confined to a label, and this is about the whole node", needs="no label")
        case Reach.FILTERED | Reach.PUBLIC:
            return
        case _:
            assert_never(needs.reach)


async def _require_session(key: ApiKey, supervisor: Supervisor, session_id: str) -> None:
    missing = SessionNotFound("no such session", session_id=session_id[:64])
    if not SESSION_ID.match(session_id):
        raise missing
    try:
        session = await supervisor.get(session_id)
    except SessionNotFound:
        raise missing from None
    if not key.reaches(session.labels):
        raise missing


log = logging.getLogger(__name__)

AT_ONCE = 50
PER_S = 20.0
PAUSE_S = 1.0
LOG_EVERY_S = 10.0


class RefusalThrottle:
    """The rate of refusals of one front, and the log lines about them."""

    def __init__(self) -> None:
        self._bucket = TokenBucket(per_s=PER_S, burst=AT_ONCE, clock=trio.current_time)
        self._logged_at = -math.inf
        self._unlogged = 0

    async def note(self, peer: object) -> None:
        """Count a refusal and return when it may be answered. `peer` is for the log."""
        now = trio.current_time()
        self._unlogged += 1
        if now - self._logged_at >= LOG_EVERY_S:
            log.warning("auth_failed", extra={"count": self._unlogged, "last_peer": _text(peer)})
            self._logged_at, self._unlogged = now, 0
        if self._bucket.take():
            await trio.sleep(PAUSE_S)


def _text(peer: object) -> str:
    """Return the address of an ASGI scope's `client`, which a unix socket lacks."""
    return str(peer[0]) if isinstance(peer, list | tuple) and peer else "unix socket"


@attrs.define
class Authenticator:
    """Authentication for all connections of one front: keys, refusals, and the count of connections without a key."""

    gate: Gate
    shares: KeyShares
    throttle: RefusalThrottle = attrs.field(factory=RefusalThrottle)
    unproven: int = 0

    async def identify(self, scope: Scope, token: bytes | None = None) -> ApiKey:
        """Return the key of a request, by its head or by a token that came later.

        Raises:
            Unauthorized: no key, or a wrong one; raised late when there are many.
        """
        try:
            return self.gate.check(scope) if token is None else self.gate.check_key(token)
        except Unauthorized as error:
            refusal = error
        await self.throttle.note(scope.get("client"))
        raise refusal
