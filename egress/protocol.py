"""The contract between the daemon and the egress process: one datagram is one message, descriptors ride with it.

`AF_UNIX SOCK_SEQPACKET`, JSON. A request carries `seq` and its answer the same `seq`; `Failed` may come in place of any
answer. Requests are served in order, `Configure` first. Notices come unasked. Bytes that are no message end the
connection, and with it the process. Values and their codec, without I/O; the daemon imports this module.

The process serves one daemon after the other. A session stays attached when its daemon ends; the next one says
`Configure` anew and takes copies of the descriptors with `TakeSession`, until there is no session left to take.

Descriptors: `AttachSession` carries [TCP listener, UDP socket] of the session's network namespace, and the BPF link
that steers to both where there is one; `UseBroker` carries a socket. The process owns what it was sent, and closes
what is a session's at `DetachSession`.
"""

from __future__ import annotations

import json
import math
import sys
import types
import typing
from functools import cache
from typing import Any, Literal

import attrs

from egress.policy import PolicyMode

MAX_DATAGRAM_BYTES = 64 * 1024
"""Room for the longest policy that `egress.policy` takes."""

MAX_FDS = 3
MAX_ENTRIES = 256
"""Log entries in one notice."""

VERSION = 3
"""To be raised when this module, or what it means, changes: a process of another version is replaced."""

CHANNEL_FD = 3
"""The descriptor, in the egress process, of its socket: one that listens for daemons, or leads to the only one."""

EGRESS_ID = 61101
"""The user and the group that the egress process runs as."""

BROKER_ID = 61102
"""User and group of the broker of secrets, the same program in another role."""

GATEWAY_ID = 61103
"""User and group of the preview gateway, another role."""

USER_IDS = {"egress": EGRESS_ID, "broker": BROKER_ID, "gateway": GATEWAY_ID}

_TAG = "type"


class ProtocolError(Exception):
    """The peer sent bytes that are no message of the contract, or a message is too large for one datagram."""


# Values -------------------------------------------------------------------------------------------------------------

EntryKind = Literal["tcp", "http", "proxy", "dns"]
EntryVerdict = Literal["allowed", "denied", "asked"]
FailureCode = Literal["NOT_CONFIGURED", "CONFIGURED", "INVALID", "DESCRIPTORS", "SESSION_EXISTS", "SESSION_UNKNOWN"]

_AT_LEAST_1: Any = attrs.validators.ge(1)
_POSITIVE: Any = attrs.validators.gt(0)
_TIME: Any = attrs.validators.and_(attrs.validators.ge(0), attrs.validators.lt(253_402_300_800))
"""Before the year 10000: a date can be made of it."""
_NONE_OR_MBIT: Any = attrs.validators.optional(attrs.validators.and_(_AT_LEAST_1, attrs.validators.le(10_000)))
"""Bytes in a second are a number of 32 bits (`egress/pacing.py`)."""
_NONE_OR_0: Any = attrs.validators.optional(attrs.validators.ge(0))


@attrs.frozen
class PolicyText:
    """A policy as rule texts that `egress.policy` parses; groups are expanded already."""

    mode: PolicyMode
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


@attrs.frozen
class WayOutLimits:
    """Limits of one session. `rate`: new connections in a second, `burst` of them at once. `idle_s`: no byte in either
    direction. `bytes_up`, `bytes_down`: of all connections since the session was attached; None is no limit. `mbit_up`,
    `mbit_down`: Mbit/s of all connections, in equal shares; None is no limit. `ask_s`: the longest time that a
    connection waits for the policy which decides on its host, in the mode `ask`.
    """

    connections: int = attrs.field(default=256, validator=_AT_LEAST_1)
    rate: float = attrs.field(default=100.0, validator=_POSITIVE)
    burst: int = attrs.field(default=500, validator=_AT_LEAST_1)
    idle_s: float = attrs.field(default=900.0, validator=_POSITIVE)
    dial_s: float = attrs.field(default=10.0, validator=_POSITIVE)
    bytes_up: int | None = attrs.field(default=None, validator=_NONE_OR_0)
    bytes_down: int | None = attrs.field(default=None, validator=_NONE_OR_0)
    mbit_up: int | None = attrs.field(default=None, validator=_NONE_OR_MBIT)
    mbit_down: int | None = attrs.field(default=None, validator=_NONE_OR_MBIT)
    ask_s: float = attrs.field(default=30.0, validator=_POSITIVE)


@attrs.frozen
class SecretUse:
    """A secret that a session may use: the text that stands for it there, and the rules for its hosts."""

    name: str
    placeholder: str
    hosts: tuple[str, ...]


@attrs.define
class WayOutCounters:
    """Counts since the session was attached; `connections_open` is of now. `denied`: connections, without DNS. The
    process counts in one of these, and a message has the numbers of its moment.
    """

    connections_open: int = 0
    connections: int = 0
    denied: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dns_queries: int = 0
    dns_denied: int = 0


@attrs.define
class EgressTotals:
    """Counts of all sessions since the process began, made as `WayOutCounters` are; `connections_open` is of now. A
    connection counts by its verdict at its end, a question when it is answered. `pauses`: times that connections had to
    wait for descriptors.
    """

    connections_open: int = 0
    allowed: int = 0
    denied: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dns_allowed: int = 0
    dns_denied: int = 0
    pauses: int = 0


@attrs.frozen
class EgressEntry:
    """A connection at its end, a refusal, or (`asked`) a host and port that the policy has not decided on, while a
    connection to it waits. `time`: of its beginning, in seconds since the epoch.

    `host`: the name, or the address where the session asked for one. `address`: the one dialled. `reason`: of a
    refusal, a `egress.policy.Reason`. `rule`: the one that decided. `cause`: how an allowed connection ended, or
    what became of one at the operator's proxy. `dial_ms`: from the first look-up to a connected server.
    """

    session_id: str
    time: float = attrs.field(validator=_TIME)
    kind: EntryKind
    host: str
    port: int
    verdict: EntryVerdict
    address: str | None = None
    reason: str | None = None
    rule: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    duration_ms: int = 0
    cause: str | None = None
    dial_ms: float | None = None


@attrs.frozen
class UpstreamProxy:
    """The operator's proxy, through which all connections go. `credentials`: `user:password` for it, or nothing."""

    address: str
    port: int
    credentials: str = attrs.field(default="", repr=False)


# Requests -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Configure:
    """The first request of a daemon. `permit`: networks that may be dialled although they are private; `always_deny`:
    rules that come before those of every session. With `upstream` no name is looked up, and nothing else is dialled. A
    pipe for the log may come along, in place of the one before.
    """

    seq: int
    permit: tuple[str, ...] = ()
    always_deny: tuple[str, ...] = ()
    upstream: UpstreamProxy | None = None
    version: int = VERSION


@attrs.frozen
class TakeSession:
    """Ask for copies of the descriptors of some session that this daemon has not taken yet."""

    seq: int


@attrs.frozen
class EndProcess:
    """End everything. Answered before."""

    seq: int


@attrs.frozen
class AttachSession:
    """Serve a session's sockets, which come along."""

    seq: int
    session_id: str
    policy: PolicyText
    limits: WayOutLimits = WayOutLimits()
    secrets: tuple[SecretUse, ...] = ()


@attrs.frozen
class SetPolicy:
    """Replace policy and limits whole. Answered when the connections that are no longer allowed have been reset."""

    seq: int
    session_id: str
    policy: PolicyText
    limits: WayOutLimits = WayOutLimits()
    secrets: tuple[SecretUse, ...] = ()


@attrs.frozen
class UseBroker:
    """Hand connections to hosts of secrets to the broker, at the other end of the socket that comes along."""

    seq: int


@attrs.frozen
class DetachSession:
    """Reset the session's connections and close its descriptors. Answered when all are closed."""

    seq: int
    session_id: str


@attrs.frozen
class DescribeSession:
    """Ask for a session's counters."""

    seq: int
    session_id: str


# Answers and notices ------------------------------------------------------------------------------------------------


@attrs.frozen
class Configured:
    """The answer to `Configure`. `is_as_asked`: the process works so; it goes on as another daemon configured it
    otherwise, and serves nothing but `TakeSession` and `EndProcess`. `totals`: of the moment."""

    seq: int
    is_as_asked: bool = True
    totals: EgressTotals = attrs.field(factory=EgressTotals)


@attrs.frozen
class SessionTaken:
    """The answer to `TakeSession`, with the descriptors as `AttachSession` has them. Without an id and descriptors: all
    are taken."""

    seq: int
    session_id: str = ""


@attrs.frozen
class Accomplished:
    """The answer to a request that asks for no facts."""

    seq: int


@attrs.frozen
class Described:
    """The answer to `DescribeSession`."""

    seq: int
    counters: WayOutCounters


@attrs.frozen
class EgressFailed:
    """A request failed, and changed nothing. `message`: a sentence."""

    seq: int
    code: FailureCode
    message: str


@attrs.frozen
class Entries:
    """A notice: log entries in the order of their ends. `dropped`: the number lost since the notice before. `totals`:
    of the moment it was sent; a change of them alone makes a notice, too."""

    dropped: int
    entries: tuple[EgressEntry, ...]
    totals: EgressTotals = attrs.field(factory=EgressTotals)


REQUESTS = (Configure, TakeSession, AttachSession, SetPolicy, UseBroker, DetachSession, DescribeSession, EndProcess)
ANSWERS = (Configured, SessionTaken, Accomplished, Described, EgressFailed, Entries)

SessionRequest = AttachSession | SetPolicy | DetachSession | DescribeSession
EgressRequest = Configure | TakeSession | UseBroker | SessionRequest | EndProcess
EgressAnswer = Configured | SessionTaken | Accomplished | Described | EgressFailed | Entries


# Codec --------------------------------------------------------------------------------------------------------------


def encode(message: attrs.AttrsInstance) -> bytes:
    """Return the datagram of a message. A field whose default None is also its value is left out: an older
    process takes what it knows.

    Raises:
        ProtocolError: the datagram would be longer than `MAX_DATAGRAM_BYTES`.
    """
    said = attrs.asdict(message, filter=lambda field, value: value is not None or field.default is not None)
    body = {_TAG: type(message).__name__, **said}
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > MAX_DATAGRAM_BYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(data)} bytes; a datagram has {MAX_DATAGRAM_BYTES}")
    return data


def decode_request(data: bytes) -> EgressRequest:
    """Return the request in a datagram; raise ProtocolError if there is none."""
    request: EgressRequest = decode(data, REQUESTS)
    return request


def decode_answer(data: bytes) -> EgressAnswer:
    """Return the answer or notice in a datagram; raise ProtocolError if there is none."""
    answer: EgressAnswer = decode(data, ANSWERS)
    return answer


def decode(data: bytes, classes: tuple[type, ...]) -> Any:
    """Return the message in a datagram, of one of these classes; raise ProtocolError if there is none."""
    try:
        body = json.loads(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None
    tag = body.pop(_TAG, None) if isinstance(body, dict) else None
    for each in classes:
        if each.__name__ == tag:
            return _structure(body, each, each.__name__)
    raise ProtocolError(f"unknown message {str(tag)[:40]!r}")


def _structure(value: object, expected: Any, where: str) -> Any:
    """Check a value of JSON against a type and build classes from objects; nothing is repaired.

    A bool is no number and a whole number is a float. `where` names the place in errors.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is types.UnionType:
        return None if value is None else _structure(value, arguments[0], where)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_structure(each, arguments[0], f"{where}[{index}]") for index, each in enumerate(value))
    if attrs.has(expected) and isinstance(value, dict):
        return _build(value, expected, where)
    if type(value) is expected and value == value and value not in (math.inf, -math.inf):
        return value
    if expected is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    raise ProtocolError(f"{where}: {type(value).__name__} where {expected} belongs")


def _build(value: dict[str, object], cls: Any, where: str) -> Any:
    hints, fields = _hints(cls), attrs.fields_dict(cls)
    missing = {name for name, field in fields.items() if field.default is attrs.NOTHING} - value.keys()
    if missing or value.keys() - fields.keys():
        raise ProtocolError(f"{where}: unknown {sorted(value.keys() - fields.keys())[:5]}, missing {sorted(missing)}")
    try:
        return cls(**{name: _structure(each, hints[name], f"{where}.{name}") for name, each in value.items()})
    except ValueError as error:
        raise ProtocolError(f"{where}: {error.args[0]}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, vars(sys.modules[cls.__module__]))
