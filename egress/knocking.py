"""The contract between the daemon and the preview gateway, on the codec of `protocol`: one datagram is one message.

Here the gateway asks and the daemon answers: for each request of HTTP the gateway knocks with the tokens that came
along, and is given a socket in the session's network or told why not. So it holds no key, and knows of no preview. A
connection to a published port is a request without tokens. `Open` is the daemon's first message and brings the listener
for HTTP; `PublishedPort` brings one for plain TCP, `Admitted` the socket. The daemon imports this.
"""

from __future__ import annotations

from typing import Any

import attrs

from egress.protocol import MAX_DATAGRAM_BYTES as MAX_DATAGRAM_BYTES
from egress.protocol import ProtocolError as ProtocolError
from egress.protocol import decode
from egress.protocol import encode as encode

MAX_TOKENS = 4
"""Tokens of one request that are looked at: any of the machine's programs may put cookies beside ours."""

MAX_KNOCKS = 256
"""Requests that may wait for the daemon's answer."""

MAX_PUBLISHED = 256
"""Listeners of published ports that the gateway may have; it keeps descriptors free for them."""

ALL_PORTS = 0


@attrs.frozen
class Open:
    """Serve the listener that comes along, if one does. `domain`: the last labels of the names that previews have;
    None: they are below `localhost`, and without TLS."""

    domain: str | None = None


@attrs.frozen
class PublishedPort:
    """Carry what connects to the listener that comes along to a port of a session, as it comes; in place of a listener
    that the port has."""

    session_id: str
    port: int


@attrs.frozen
class Knock:
    """Ask whether a request with these tokens may go to a port of a session. `is_plain`: it is a connection to the
    listener of a published port, which has none."""

    seq: int
    session_id: str
    port: int
    tokens: tuple[str, ...] = ()
    is_plain: bool = False


@attrs.frozen
class Admitted:
    """The request may. A socket comes along, not connected yet; `lasts_s`: seconds until the preview ends; None: until
    it is revoked, for its end may be put off."""

    seq: int
    lasts_s: float | None


@attrs.frozen
class NotAdmitted:
    """The request may not, or can't now. `status` is of HTTP, `code` an error code, `message` a sentence."""

    seq: int
    status: int
    code: str
    message: str


@attrs.frozen
class Revoke:
    """End every request of a session that is under way, for one port or for `ALL_PORTS` but those `kept`, and close the
    listeners."""

    session_id: str
    port: int
    kept: tuple[int, ...] = ()


Order = Open | PublishedPort | Admitted | NotAdmitted | Revoke
_ORDERS = (Open, PublishedPort, Admitted, NotAdmitted, Revoke)


def decode_order(data: bytes) -> Order:
    """Return the daemon's message in a datagram; raise ProtocolError if there is none."""
    order: Any = decode(data, _ORDERS)
    return order  # type: ignore[no-any-return]


def decode_knock(data: bytes) -> Knock:
    """Return the gateway's message in a datagram; raise ProtocolError if there is none."""
    knock: Any = decode(data, (Knock,))
    return knock  # type: ignore[no-any-return]
