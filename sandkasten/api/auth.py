"""Who may ask: the bearer key, and without one the proof that no web page is asking. Reads headers only.

Without a key the daemon is on loopback or a unix socket alone, where a browser the user runs can reach it too: a
foreign page could post to it, or rebind its own name to 127.0.0.1. So `Host` must be a loopback name and `Origin`, if
sent, our own (RFC 6454 §7; unix sockets are out of a browser's reach).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from sandkasten.api.guard import Scope
from sandkasten.errors import Unauthorized


class Gate:
    """Check requests against `api_key`; the key itself isn't kept."""

    def __init__(self, api_key: str | None) -> None:
        self._digest = None if api_key is None else _digest(api_key.encode())

    def check(self, scope: Scope) -> None:
        """Let the request pass or raise `Unauthorized`."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(bytes(name), []).append(bytes(value))
        if self._digest is not None:
            self._check_key(headers.get(b"authorization", []))
        elif scope.get("server") is not None:  # hypercorn gives a unix socket no address
            _check_is_local(headers)

    def _check_key(self, values: list[bytes]) -> None:
        scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        is_right = hmac.compare_digest(_digest(key.strip()), self._digest or b"")
        if scheme.lower() != b"bearer" or not is_right:
            raise Unauthorized("send the API key as 'Authorization: Bearer <key>'")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # equal lengths, so that comparing tells nothing of the key's


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
