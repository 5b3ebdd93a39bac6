"""Who asks: the owner of a key, and without one who proves that no web page is asking. Reads headers only.

A key is the configured one or one of the ring's (`admission/keyring.py`); what it may do is decided in `access.py`.

Without a key the daemon is on loopback or a unix socket alone, where a browser the user runs can reach it too: a
foreign page could post to it, or rebind its own name to 127.0.0.1. So `Host` must be a loopback name and `Origin`, if
sent, our own (RFC 6454 §7; unix sockets are out of a browser's reach).
"""

from __future__ import annotations

import hmac
import ipaddress

from sandkasten.admission.keyring import KeyRing
from sandkasten.api.http.guard import Scope
from sandkasten.model.errors import PermissionDenied, Unauthorized
from sandkasten.model.keys import CONFIGURED, LOCAL, ApiKey, digest_of


class Gate:
    """Find out who asks. `api_key` is the configured key, which isn't kept; without one no key is asked for."""

    def __init__(self, api_key: str | None, ring: KeyRing) -> None:
        self._digest = None if api_key is None else digest_of(api_key.encode())
        self._ring = ring

    def check(self, scope: Scope) -> ApiKey:
        """Return whose request that is, or raise `Unauthorized`."""
        headers = _headers(scope)
        if self._digest is not None:
            return self._check_bearer(headers.get(b"authorization", []))
        if scope.get("server") is not None:  # hypercorn gives a unix socket no address
            _check_is_local(headers)
        return LOCAL

    def check_key(self, token: bytes) -> ApiKey:
        """Return the key with that token or raise `Unauthorized`. Takes as long for every wrong token."""
        if (key := self._find(token)) is None:
            raise Unauthorized("the API key is wrong")
        return key

    def _find(self, token: bytes) -> ApiKey | None:
        if self._digest is None:
            return None
        found = self._ring.find(token)
        return CONFIGURED if hmac.compare_digest(digest_of(token), self._digest) else found

    def is_key_missing(self, scope: Scope) -> bool:
        """Whether a key is needed and the request says nothing of one."""
        return self._digest is not None and not any(name == b"authorization" for name, _ in scope["headers"])

    def check_origin(self, scope: Scope, *, allowed: tuple[str, ...]) -> None:
        """Let a WebSocket of our own or an allowed origin pass: browsers open one to anywhere, with what they hold
        for us, and only tell where the page is from (RFC 6455 §10.2). Without a key `check` is stricter.

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
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        key = self._find(token.strip())
        if scheme.lower() != b"bearer" or key is None:
            raise Unauthorized("send the API key as 'Authorization: Bearer <key>'")
        return key


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
    """Whether a `Host` header's value names this machine's loopback."""
    name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    if port and not port.isdigit():
        return False
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
