"""Values of a session's network: what a session may reach, its counters, the log of what it reached for, and previews:
ports inside that are reached from outside.

Frozen and free of I/O. A rule is kept as its author wrote it, so that a client reads back what it sent; a rule that
begins with `@` stands for a group of the configuration. `admission/network.py` checks rules and expands groups.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import attrs


class NetworkMode(enum.StrEnum):
    """Modes of a session's network, the narrowest first."""

    NONE = "none"
    """The session's own loopback."""

    ALLOW = "allow"
    """Hosts that `allow` names and `deny` does not."""

    ASK = "ask"
    """Hosts as in `allow`. A connection to a host that neither `allow` nor `deny` names waits for a change of these."""

    OPEN = "open"
    """Every public address by TCP that `deny` does not name; never private addresses, the host or metadata services."""

    BRIDGE = "bridge"
    """As `OPEN`, or what `allow` names if it names anything, by every protocol of IPv4: through a link of its own into
    the node's network. Rules are for addresses."""

    def exceeds(self, most: NetworkMode) -> bool:
        """Whether this mode reaches more than `most`."""
        order = list(NetworkMode)
        return order.index(self) > order.index(most)


class EgressLogging(enum.StrEnum):
    """Connections and questions that are logged."""

    ALL = "all"
    DENIED = "denied"


NETWORK_LIMIT_BOUNDS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "connections": (1, 8192),
        **dict.fromkeys(("mbit_up", "mbit_down"), (1, 10_000)),
        **dict.fromkeys(("bytes_up", "bytes_down"), (1, 2**53)),
    }
)
"""Lowest and highest value of each field of `NetworkLimits`."""


@attrs.frozen
class NetworkLimits:
    """Limits of a session's way out; None is the default. `connections` are open at one time. `bytes_up` left the
    session, in names that were looked up outside as well, and `bytes_down` reached it since its way out was opened, or
    opened again by a next daemon or process.
    `mbit_up` and `mbit_down` are Mbit/s of all connections together, each of which has an equal share."""

    connections: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    mbit_up: int | None = None
    mbit_down: int | None = None


_PROXY = "http://198.18.0.1:3128"
PROXY_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _PROXY),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,198.18.0.1"),
    }
)
"""Variables of the environment by which programs find the proxy of a session's way out (`egress/proxy.py`)."""


TRUST_FILE = "/run/sandkasten/views/trust.pem"
"""The file of a session with secrets that holds its image's authorities and the installation's
(`nsinit/sandbox/views.py`)."""
TRUST_VARIABLES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        (
            "SSL_CERT_FILE",
            "REQUESTS_CA_BUNDLE",
            "NODE_EXTRA_CA_CERTS",
            "GIT_SSL_CAINFO",
            "CURL_CA_BUNDLE",
            "PIP_CERT",
        ),
        TRUST_FILE,
    )
)
"""Variables of the environment by which programs find the authorities to trust."""

MAX_SESSION_SECRETS = 16
"""Most secrets of one session."""


def _texts(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(value)


def _limits(value: NetworkLimits | Mapping[str, Any]) -> NetworkLimits:  # Any: JSON
    return NetworkLimits(**value) if isinstance(value, Mapping) else value


@attrs.frozen
class Network:
    """The network of a session. `allow` and `deny` are rules; `deny` is asked before `allow`. With `proxy_env` the
    session's environment names the proxy of its way out, for programs that can't do without. `secrets` are names of
    values that the session may use and not read.
    """

    mode: NetworkMode = attrs.field(default=NetworkMode.NONE, converter=NetworkMode)
    allow: Sequence[str] = attrs.field(default=(), converter=_texts)
    deny: Sequence[str] = attrs.field(default=(), converter=_texts)
    limits: NetworkLimits = attrs.field(factory=NetworkLimits, converter=_limits)
    log: EgressLogging = attrs.field(default=EgressLogging.ALL, converter=EgressLogging)
    proxy_env: bool = False
    secrets: Sequence[str] = attrs.field(default=(), converter=_texts)

    @property
    def has_way_out(self) -> bool:
        """Whether the session may reach anything beside itself."""
        return self.mode is not NetworkMode.NONE

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables of the session's environment that come with the network; those of a caller go before."""
        return {
            **(PROXY_VARIABLES if self.proxy_env and self.has_way_out else {}),
            **(TRUST_VARIABLES if self.secrets else {}),
        }


@attrs.frozen
class NetworkCounters:
    """Counts of a session's way out since it was opened; `connections_open` is the number at one moment."""

    connections_open: int = 0
    connections: int = 0
    denied: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dns_queries: int = 0
    dns_denied: int = 0


@attrs.frozen
class NetworkInfo:
    """The network of a live session, the number of its present policy, and its counters."""

    network: Network
    revision: int
    counters: NetworkCounters = attrs.field(factory=NetworkCounters)


class EgressKind(enum.StrEnum):
    """Kinds of entry: a connection, one that is HTTP in plain text, one to the proxy, a question to the resolver."""

    TCP = "tcp"
    HTTP = "http"
    PROXY = "proxy"
    DNS = "dns"


class EgressVerdict(enum.StrEnum):
    """Verdicts on a connection or a question; `ASKED`: none yet, and a connection waits for one."""

    ALLOWED = "allowed"
    DENIED = "denied"
    ASKED = "asked"


@attrs.frozen
class EgressEntry:
    """A connection at its end, a refused one, a question to the resolver, or a host that connections wait for.

    `host` is the name that was asked for, or the address where the program used one; `address` was dialled. `rule`
    decided, `reason` is the reason of a refusal, `cause` of the connection's end. `exec_id` is the run whose program
    asked, where it can have been no other's. Never has a path, a header or a body.
    """

    cursor: str
    time: datetime
    kind: EgressKind
    verdict: EgressVerdict
    host: str
    port: int | None = None
    address: str | None = None
    reason: str | None = None
    rule: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    duration_ms: int = 0
    cause: str | None = None
    exec_id: str | None = None


@attrs.frozen
class EgressPage:
    """Entries of a log, oldest first. `cursor` is the place behind the last one that was looked at; `dropped` entries
    were lost before they could be kept: of all sessions, so at most that many of this one. `missed`: entries behind the
    cursor that was asked for, and before the last one here, that are kept no more."""

    entries: Sequence[EgressEntry]
    cursor: str
    dropped: int = 0
    missed: int = 0


@attrs.frozen
class EgressDenial:
    """A refusal of a session's way out, `count` times; `port` is None for a name that was not resolved."""

    host: str
    port: int | None
    reason: str
    count: int = 1


MAX_DENIALS = 8
"""Most refusals in the end of one run."""


# Secrets --------------------------------------------------------------------------------------------------------------


@attrs.frozen
class NewSecret:
    """A secret to keep. Its text has no value in it. `hosts` are rules for names; `placeholder` stands for the value in
    sessions, None: a text of each session's own."""

    name: str
    value: str = attrs.field(repr=False)
    hosts: Sequence[str] = attrs.field(converter=_texts)
    placeholder: str | None = None


@attrs.frozen
class SecretInfo:
    """A kept secret; nothing gives its value back."""

    name: str
    hosts: Sequence[str]
    placeholder: str | None = None


# The way in ----------------------------------------------------------------------------------------------------------

PORT_BOUNDS = (1, 65535)
PREVIEW_TTL_BOUNDS_S = (1, 86_400)
"""Seconds for which a preview may hold."""

EVERY_PORT = 0
"""The port of a preview of every port that has none of its own."""

MAX_PREVIEWS = 16
"""Most previews of one session."""


class PreviewAccess(enum.StrEnum):
    """Access to a preview: for whoever has its token, or for whoever knows its name; or, as plain TCP on a port of the
    node, for every program on the node's machine."""

    TOKEN = "token"
    PUBLIC = "public"
    LOCAL = "local"


@attrs.frozen
class PreviewSpec:
    """A preview to open, of a port or of `EVERY_PORT`. `keep_alive`: each request counts as a use of the session, whose
    idle end it puts off. `resume`: a request ends a pause. `host_port`: the port of the node for the access `local`; 0
    is any free one."""

    port: int
    ttl_s: int = 3600
    access: PreviewAccess = PreviewAccess.TOKEN
    keep_alive: bool = False
    resume: bool = False
    host_port: int = 0


@attrs.frozen
class Preview:
    """An open preview. `epoch` is new with each opening, so that tokens of an earlier one are void. `host_port` is None
    unless the access is `local`."""

    port: int
    access: PreviewAccess
    epoch: str
    expires_at: datetime
    keep_alive: bool = False
    resume: bool = False
    host_port: int | None = None


@attrs.frozen
class SignedPreview:
    """A preview with its URL and its token; the token is None where none is needed. The URL of one of every port is a
    template with `{port}` (RFC 6570). `gateway` is the address that serves HTTP, None for a published port."""

    preview: Preview
    url: str
    token: str | None
    gateway: tuple[str, int] | None = None
