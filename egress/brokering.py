"""The contract of the broker with the daemon and with the egress process, on the codec of `protocol`.

The daemon keeps secrets with the broker and asks for their names; a value goes one way. It brings the broker together
with the egress process, by one end of a socket pair for each (`JoinEgress`, `protocol.UseBroker`). There the egress
process hands over connections: `Carry` brings one end of a pair for the client and one for the server, and `CarryEnded`
is the connection's end. The daemon imports this.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from egress.policy import InvalidRule, parse_rule
from egress.protocol import MAX_DATAGRAM_BYTES as MAX_DATAGRAM_BYTES
from egress.protocol import ProtocolError as ProtocolError
from egress.protocol import SecretUse, decode
from egress.protocol import encode as encode

MAX_SECRETS = 256
MAX_HOSTS, MAX_HOSTS_CHARS = 8, 512
VALUE_CHARS = 8, 4096
"""Least and most characters of a value. A shorter one would be found in answers by accident."""
PLACEHOLDER_CHARS = 16, 128
SECRET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
SECRET_NAME_RULE = "must be 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-', and begin with a letter or a digit"
PRINTABLE = re.compile(r"[!-~]+(?: +[!-~]+)*")
VISIBLE = re.compile(r"[!-~]+")

BrokerFailureCode = Literal["INVALID", "FULL", "UNKNOWN", "STORAGE"]


def secret_problem(name: str, value: str, hosts: tuple[str, ...], placeholder: str | None) -> tuple[str, str] | None:
    """Return the field that can't be that of a secret and a sentence on it, which never has the value; None if all
    can."""
    if not SECRET_NAME.fullmatch(name):
        return "name", SECRET_NAME_RULE
    if not VALUE_CHARS[0] <= len(value) <= VALUE_CHARS[1] or not PRINTABLE.fullmatch(value):
        return "value", f"must be {VALUE_CHARS[0]} to {VALUE_CHARS[1]} printable ASCII characters, no space at an end"
    if not 1 <= len(hosts) <= MAX_HOSTS or sum(map(len, hosts)) > MAX_HOSTS_CHARS:
        return "hosts", f"must be 1 to {MAX_HOSTS} hosts of at most {MAX_HOSTS_CHARS} characters together"
    try:
        if not all(isinstance(parse_rule(host).host, str) for host in hosts):
            return "hosts", "must be names; an address has no certificate"
    except InvalidRule as error:
        return "hosts", str(error)
    if placeholder is not None:
        low, high = PLACEHOLDER_CHARS
        if not low <= len(placeholder) <= high or not VISIBLE.fullmatch(placeholder):
            return "placeholder", f"must be {low} to {high} visible ASCII characters"
        if placeholder in value or value in placeholder:
            return "placeholder", "must differ from the value"
    return None


# Of the daemon --------------------------------------------------------------------------------------------------------


@attrs.frozen
class PutSecret:
    """Keep a secret, in place of one of that name. `hosts` are rules of `policy` for names."""

    seq: int
    name: str
    value: str = attrs.field(repr=False)
    hosts: tuple[str, ...] = ()
    placeholder: str | None = None


@attrs.frozen
class DropSecret:
    """Forget a secret. `BrokerFailed` with `UNKNOWN`: there is none of that name."""

    seq: int
    name: str


@attrs.frozen
class ListSecrets:
    """Ask for secrets without their values, those with names behind `after`."""

    seq: int
    after: str = ""


@attrs.frozen
class JoinEgress:
    """Carry connections for the egress process at the other end of the socket that comes along."""

    seq: int


@attrs.frozen
class SecretFacts:
    """A secret without its value."""

    name: str
    hosts: tuple[str, ...]
    placeholder: str | None = None


@attrs.frozen
class SecretsListed:
    """The answer to `ListSecrets`, in the order of names. `certificate`: that of the authority, in PEM."""

    seq: int
    secrets: tuple[SecretFacts, ...]
    certificate: str
    is_last: bool


@attrs.frozen
class BrokerDone:
    """The answer to the other requests."""

    seq: int


@attrs.frozen
class BrokerFailed:
    """A request failed, and changed nothing. `message`: a sentence."""

    seq: int
    code: BrokerFailureCode
    message: str


BrokerRequest = PutSecret | DropSecret | ListSecrets | JoinEgress
BrokerAnswer = SecretsListed | BrokerDone | BrokerFailed

# Of the egress process ------------------------------------------------------------------------------------------------


@attrs.frozen
class Carry:
    """Open the TLS of a connection to `port` of `host`. Comes with two stream sockets: of the client, which begins with
    its ClientHello, and of the server. `uses`: the secrets of the session."""

    seq: int
    session_id: str
    host: str
    port: int
    uses: tuple[SecretUse, ...]


@attrs.frozen
class CarryEnded:
    """A connection has ended. `reason`: a `policy.Reason`, if a check ended it."""

    seq: int
    reason: str | None = None


def decode_broker_request(data: bytes) -> BrokerRequest:
    """Return the daemon's message in a datagram; raise ProtocolError if there is none."""
    request: Any = decode(data, (PutSecret, DropSecret, ListSecrets, JoinEgress))
    return request  # type: ignore[no-any-return]


def decode_broker_answer(data: bytes) -> BrokerAnswer:
    """Return the broker's answer in a datagram; raise ProtocolError if there is none."""
    answer: Any = decode(data, (SecretsListed, BrokerDone, BrokerFailed))
    return answer  # type: ignore[no-any-return]


def decode_carry(data: bytes) -> Carry:
    """Return the egress process's message in a datagram; raise ProtocolError if there is none."""
    carry: Any = decode(data, (Carry,))
    return carry  # type: ignore[no-any-return]


def decode_carried(data: bytes) -> CarryEnded:
    """Return the broker's message to the egress process in a datagram; raise ProtocolError if there is none."""
    carried: Any = decode(data, (CarryEnded,))
    return carried  # type: ignore[no-any-return]
