"""Rules of a way out, and the decision on one name, or on one connection. No input, no output, attrs alone.

A rule is `host[:port[,port]]`. Its host is a name (`example.org`), all names below one (`*.example.org`, at any depth,
not `example.org` itself), an address, or a network (`192.0.2.0/24`, `[2001:db8::/32]:443`). Without ports, a rule that
allows is for 80 and 443, and a rule that denies is for every port. Rules that deny come before rules that allow.
"""

from __future__ import annotations

import enum
import re
import typing
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Literal

import attrs

MAX_RULES = 256
MAX_PORTS = 16
MAX_POLICY_CHARS = 48 * 1024
"""Text of all rules of a policy together, so that a policy fits into one datagram of 64 KiB."""

DEFAULT_PORTS = (80, 443)
MAX_NAME_CHARS = 253  # RFC 1035, 3.1: 255 octets with the length of each label and the root's

_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*", re.ASCII)
_NUMERIC_END = re.compile(r"(?:\d+|0x[^.]*)\Z", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_PREFIX = re.compile(r"0|[1-9][0-9]{0,2}", re.ASCII)
_V4 = re.compile(r"[0-9]+(?:\.[0-9]+){3}", re.ASCII)

PolicyMode = Literal["allow", "ask", "open"]
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class InvalidRule(ValueError):
    """A rule, or a name, that nobody may write. The message names the text and the reason."""


class Reason(enum.StrEnum):
    """Cause of a refusal, as the log and the session's caller see it."""

    NOT_ALLOWED = "not_allowed"
    """No rule allows the name or the address."""
    DENIED = "denied"
    """A rule denies the name or the address."""
    PORT = "port"
    """A rule allows the name or the address, on other ports."""
    BAD_NAME = "bad_name"
    BAD_ADDRESS = "bad_address"
    """The address is special, private, or this host's own."""
    NO_ADDRESS = "no_address"
    """The name has no address that may be dialled."""
    UNKNOWN_ADDRESS = "unknown_address"
    """The address is of the range that stands for names, and stands for none."""
    SNI = "sni"
    """The server name of a TLS ClientHello is absent, or another."""
    NOT_TLS = "not_tls"
    HOST = "host"
    """The Host of a request is another."""
    BAD_HTTP = "bad_http"
    """A request or an answer that two readers may read in two ways."""
    UNANSWERED = "unanswered"
    """No rule allows or denies it; in the mode `ask` nobody has said which, or did not in time."""
    LIMIT = "limit"
    RESOLVER = "resolver"
    """The resolver outside gave no answer."""
    DIAL = "dial"
    UPSTREAM = "upstream"
    """The operator's proxy refused the connection, or was not reached."""
    TIMEOUT = "timeout"
    CERTIFICATE = "certificate"
    """The server of a host that has a secret shows no certificate that is good for the host."""
    UNTRUSTED = "untrusted"
    """The client broke off the TLS that the broker opens: most often it does not trust the session's authority."""
    ECHO = "echo"
    """An answer had the value of a secret in it."""
    BROKER = "broker"
    """The process that has the secrets can't be reached."""
    ERROR = "error"
    """A check failed by a fault of its own."""


def canonical_name(text: str) -> str:
    """Return a domain name in lower case, in ASCII, without its trailing dot.

    A name beyond ASCII becomes its IDNA form. The form must lead back to the name: characters that IDNA replaces
    (`ß`, full-width letters and dots, invisible joiners) would allow a name that nobody wrote.

    Raises:
        InvalidRule: `text` is no name: a bad label, too long, or an address in disguise (`2130706433`, `0x7f.1`).
    """
    name = text[:-1] if text.endswith(".") else text
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRule(f"name {_short(text)}: longer than {MAX_NAME_CHARS} characters")
    name = name.lower() if name.isascii() else _idna(name, text)
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise InvalidRule(f"name {_short(text)}: no domain name: labels have 1 to 63 of a-z, 0-9, '-' and '_'")
    if _NUMERIC_END.match(name.rpartition(".")[2]):
        raise InvalidRule(f"name {_short(text)}: the last label is a number, as of an address")
    return name


def _idna(name: str, text: str) -> str:
    lowered = name.lower()
    try:
        encoded = lowered.encode("idna")
        if encoded.decode("idna") == lowered and [*map(str.isascii, lowered)] == [*map(str.isascii, name)]:
            return encoded.decode("ascii")  # the Kelvin sign would become a k
    except UnicodeError:
        pass
    raise InvalidRule(f"name {_short(text)}: has no one form in ASCII; write its labels as xn--…")


@attrs.frozen
class EgressRule:
    """Names or addresses, and ports of them. `str` gives the canonical text."""

    host: str | IPv4Network | IPv6Network
    ports: tuple[int, ...] = DEFAULT_PORTS
    """Sorted, never empty."""
    is_bare: bool = False
    """Written without ports: as a rule that denies, for all."""

    def __str__(self) -> str:
        host = self.host if isinstance(self.host, str) else _network_text(self.host)
        if self.is_bare:
            return host
        return f"{f'[{host}]' if ':' in host else host}:{','.join(map(str, self.ports))}"

    def is_for_name(self, name: str) -> bool:
        """Tell whether a canonical name is the rule's, or below its suffix."""
        if not isinstance(self.host, str):
            return False
        return name.endswith(self.host[1:]) if self.host.startswith("*.") else name == self.host

    def is_for_address(self, address: Address) -> bool:
        """Tell whether an address is in the rule's network."""
        return not isinstance(self.host, str) and address in self.host


@lru_cache(maxsize=4096)  # the rules of a group are those of every session that has it
def parse_rule(text: str) -> EgressRule:
    """Return the rule of a text; `parse_rule(str(rule)) == rule`.

    Raises:
        InvalidRule: the text is no rule. A network has no bit set beyond its prefix, and is not IPv4 within IPv6.
    """
    try:
        host, ports = _split(text)
        return EgressRule(_host(host), DEFAULT_PORTS if ports is None else _ports(ports), is_bare=ports is None)
    except ValueError as error:
        raise InvalidRule(f"rule {_short(text)}: {error}") from None


def parse_proxy(url: str) -> tuple[Address, int]:
    """Return the address and the port of an operator's proxy, `http://ADDRESS:PORT`.

    Raises:
        ValueError: it is none. A name is refused: the kernel's check has to know the address.
    """
    host, port = _split(url.removeprefix("http://").removesuffix("/"))
    if not url.startswith("http://") or port is None or not _PORT.fullmatch(port) or int(port) > 65535 or "%" in host:
        raise ValueError(f"{url!r} is no http://ADDRESS:PORT")
    try:
        return unwrapped(ip_address(host)), int(port)
    except ValueError:
        raise ValueError(f"{url!r} is no http://ADDRESS:PORT, and a name is no address") from None


def _split(text: str) -> tuple[str, str | None]:
    """Return the host and the ports of a rule; the brackets around IPv6 are off."""
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        if not closing or ":" not in host or (rest and not rest.startswith(":")):
            raise ValueError("brackets are for IPv6: [2001:db8::1]:443")
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        return text, None
    host, colon, ports = text.partition(":")
    return host, ports if colon else None


def _host(text: str) -> str | Network:
    if text == "*":
        raise ValueError("`*` allows everything: name a suffix (*.example.org), or use the mode `open`")
    if text.startswith("@"):
        raise ValueError("a group is no rule")
    address, slash, prefix = text.partition("/")
    if slash or ":" in text or _V4.fullmatch(text):
        return _network(address, prefix if slash else None)
    return f"*.{canonical_name(text[2:])}" if text.startswith("*.") else canonical_name(text)


def _network(address: str, prefix: str | None) -> Network:
    if "%" in address or not address.isascii():
        raise ValueError("an address has no zone and no characters beyond ASCII")
    if prefix is not None and not _PREFIX.fullmatch(prefix):
        raise ValueError("a prefix is a number of bits, as in 192.0.2.0/24")
    parsed = ip_address(address)  # four decimals without leading zeros, or RFC 4291 text
    bits = parsed.max_prefixlen if prefix is None else int(prefix)
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        raise ValueError("IPv4 within IPv6: write the IPv4 address")
    return IPv4Network((parsed, bits)) if isinstance(parsed, IPv4Address) else IPv6Network((parsed, bits))


def _ports(text: str) -> tuple[int, ...]:
    words = text.split(",", MAX_PORTS)
    if len(words) > MAX_PORTS:
        raise ValueError(f"more than {MAX_PORTS} ports")
    if not all(_PORT.fullmatch(word) and int(word) <= 65535 for word in words):
        raise ValueError("ports are numbers from 1 to 65535, divided by commas")
    return tuple(sorted({int(word) for word in words}))


def _network_text(network: Network) -> str:
    is_single = network.prefixlen == network.max_prefixlen
    return str(network.network_address) if is_single else str(network)


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


def unwrapped(address: Address) -> Address:
    """Return the IPv4 address within an IPv4-mapped one (RFC 4291, 2.5.5.2): the kernel dials that."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


@attrs.frozen
class Ruling:
    """Decision on a name or on a connection."""

    is_allowed: bool
    reason: Reason | None = None
    """Cause of a refusal; None if allowed."""
    rule: str | None = None
    """Text of the deciding rule, if one decided."""


@attrs.frozen
class Policy:
    """Bounds of a session: what a rule allows in the modes `allow` and `ask`, and all that no rule denies in the mode
    `open`. In the mode `ask` a refusal for want of a rule has the reason `UNANSWERED`: a later policy may decide.
    """

    mode: PolicyMode
    allow: tuple[EgressRule, ...] = ()
    deny: tuple[EgressRule, ...] = ()

    def judge_name(self, name: str) -> Ruling:
        """Decide whether a name may be resolved: there is a port on which it would be allowed."""
        try:
            name = canonical_name(name)
        except InvalidRule:
            return Ruling(False, Reason.BAD_NAME)
        denying = [rule for rule in self.deny if rule.is_for_name(name)]
        for rule in denying:
            if rule.is_bare:
                return Ruling(False, Reason.DENIED, str(rule))
        if self.mode == "open":
            return Ruling(True)
        denied_ports = {port for rule in denying for port in rule.ports}
        allowing = [rule for rule in self.allow if rule.is_for_name(name)]
        for rule in allowing:
            if not denied_ports.issuperset(rule.ports):
                return Ruling(True, None, str(rule))
        if allowing and self.mode != "ask":
            return Ruling(False, Reason.DENIED, str(denying[0]))
        return self._unless_closed(None)

    def judge(self, name: str | None, address: Address | None, port: int) -> Ruling:
        """Decide on a connection to a port of a name, or of an address without a name.

        A name that was resolved is judged with each of its addresses: a rule that denies the address denies it. Rules
        for networks allow literal addresses alone, so a name is allowed by rules for names.
        """
        try:
            name = None if name is None else canonical_name(name)
        except InvalidRule:
            return Ruling(False, Reason.BAD_NAME)
        address = None if address is None else unwrapped(address)
        if name is None and address is None:
            return Ruling(False, Reason.BAD_ADDRESS)
        for rule in self.deny:
            if (rule.is_bare or port in rule.ports) and _concerns(rule, name, address):
                return Ruling(False, Reason.DENIED, str(rule))
        allowing = [rule for rule in self.allow if _concerns(rule, name, address if name is None else None)]
        for rule in allowing:
            if port in rule.ports:
                return Ruling(True, None, str(rule))
        return self._unless_closed(allowing[0] if allowing else None)

    def _unless_closed(self, other_ports: EgressRule | None) -> Ruling:
        """Return the decision where no rule decided."""
        if self.mode == "open":
            return Ruling(True)
        if self.mode == "ask":
            return Ruling(False, Reason.UNANSWERED)
        if other_ports is not None:
            return Ruling(False, Reason.PORT, str(other_ports))
        return Ruling(False, Reason.NOT_ALLOWED)


def parse_policy(mode: str, allow: Sequence[str], deny: Sequence[str]) -> Policy:
    """Return the policy of a mode and of the texts of its rules.

    Raises:
        InvalidRule: the mode is no mode, a text is no rule, or the rules are too many or too long together.
    """
    if len(allow) + len(deny) > MAX_RULES:
        raise InvalidRule(f"{len(allow) + len(deny)} rules: at most {MAX_RULES}")
    if sum(map(len, (*allow, *deny))) > MAX_POLICY_CHARS:
        raise InvalidRule(f"all rules together have more than {MAX_POLICY_CHARS} characters")
    for known in typing.get_args(PolicyMode):
        if mode == known:
            return Policy(known, _parsed(allow), _parsed(deny))
    raise InvalidRule(f"mode {_short(mode)}: none of {', '.join(typing.get_args(PolicyMode))}")


def _parsed(texts: Iterable[str]) -> tuple[EgressRule, ...]:
    return tuple(parse_rule(text) for text in texts)


def _concerns(rule: EgressRule, name: str | None, address: Address | None) -> bool:
    return (name is not None and rule.is_for_name(name)) or (address is not None and rule.is_for_address(address))
