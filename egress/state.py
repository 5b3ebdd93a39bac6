"""State of one session's way out, shared by its parts: policy, limits, names, counters; and how addresses are found.

`way_out.py` owns it; connections and DNS answers read it at each decision, so that a new policy counts at once.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address

import attrs
import trio

from egress.addresses import AddressCheck
from egress.handed import HandOverLink
from egress.names import SyntheticName, SyntheticNames, place_of
from egress.pacing import Pacing
from egress.policy import Address, EgressRule, Policy, Reason, parse_rule
from egress.protocol import (
    MAX_FDS,
    EgressEntry,
    EgressTotals,
    SecretUse,
    UpstreamProxy,
    WayOutCounters,
    WayOutLimits,
)
from egress.resolver import LookupShare, NameResolver

PINNED_S = 300.0
"""The longest time that a name's addresses are dialled without asking again."""

MAX_CONNECTIONS = 8192
"""Open connections of all sessions."""


PROMPT_RATE, PROMPT_BURST = 20.0, 50.0
"""Refusals of a session in a second that are told at once, so that a run that ends then knows of them."""

MAX_ASKED = 64
"""Hosts and ports of a session that the daemon is asked about within the time of one answer."""

OWN_DESCRIPTORS = 32
"""Room for those of the process itself, and of look-ups."""


class Refusal(Exception):
    """A connection or a name is refused."""

    def __init__(self, reason: Reason, rule: str | None = None) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.rule = rule


@attrs.define(eq=False)
class RateBucket:
    """A token bucket: `burst` at once, then `rate` in a second."""

    rate: float
    burst: float
    _tokens: float = attrs.field(default=attrs.Factory(lambda self: self.burst, takes_self=True))
    _filled_at: float = 0.0

    def take(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        self._tokens = min(self.burst, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self.rate
        self._tokens -= 1
        return 0.0


@attrs.define(eq=False)
class SharedState:
    """State that all sessions share. `fault` logs an error of our own; `descriptors`: the most that the process may
    have; `changed` is called after a change of `totals`; `handed` connections are with the broker now. With `upstream`
    no name is looked up.
    """

    resolver: NameResolver
    check: AddressCheck
    report: Callable[[EgressEntry], None]
    fault: Callable[[str, BaseException], None]
    changed: Callable[[], None] = attrs.field(default=lambda: None)
    totals: EgressTotals = attrs.field(factory=EgressTotals)
    descriptors: int = attrs.field(factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sessions: int = 0
    broker: HandOverLink | None = None
    handed: int = 0
    upstream: UpstreamProxy | None = None

    def has_descriptors(self) -> bool:
        """Tell whether one more connection could be accepted and dialled."""
        used = OWN_DESCRIPTORS + MAX_FDS * self.sessions + 2 * (self.totals.connections_open + self.handed)
        return used + 2 <= self.descriptors

    def has_place(self) -> bool:
        """Tell whether one more session would leave descriptors for a connection."""
        return OWN_DESCRIPTORS + MAX_FDS * (self.sessions + 1) + 2 <= self.descriptors


@attrs.frozen
class HostSecret:
    """A secret of a session, with the rules for its hosts."""

    use: SecretUse
    rules: tuple[EgressRule, ...]

    @classmethod
    def of(cls, use: SecretUse) -> HostSecret:
        """Parse the rules. Raises `InvalidRule`."""
        return cls(use, tuple(parse_rule(text) for text in use.hosts))


@attrs.define(eq=False)
class WayOutState:
    """State of one session's way out. `cut_all` ends all of its connections, with a cause."""

    session_id: str
    policy: Policy
    limits: WayOutLimits
    machine: SharedState
    cut_all: Callable[[str], None] = attrs.field(default=lambda _cause: None)
    secrets: tuple[HostSecret, ...] = ()
    is_spent: bool = False
    """More bytes were wanted than the limits allow: until there are other limits no connection is opened, and no name
    looked up, for a name carries bytes to who answers for it."""
    names: SyntheticNames = attrs.field(factory=SyntheticNames)
    share: LookupShare = attrs.field(
        default=attrs.Factory(lambda self: LookupShare(lambda size: self.spend(size, 0)), takes_self=True)
    )
    prompt: RateBucket = attrs.field(factory=lambda: RateBucket(PROMPT_RATE, PROMPT_BURST))
    """Refusals that are told at once; the others are told with all that come within a moment."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while bytes of HTTP are read, which takes the processor for milliseconds."""
    counters: WayOutCounters = attrs.field(factory=WayOutCounters)
    pacing: Pacing = attrs.field(
        default=attrs.Factory(lambda self: Pacing(self.limits.mbit_up, self.limits.mbit_down), takes_self=True)
    )
    policy_changed: trio.Event = attrs.field(factory=trio.Event)
    """Set when the policy is replaced; there is another event then."""
    _asked: dict[tuple[str | Address, int], float] = attrs.field(factory=dict)
    """Hosts and ports that the daemon was asked about, with the end of the time for an answer."""

    def change(self, policy: Policy, limits: WayOutLimits) -> None:
        """Replace policy and limits; what the new policy decides is not asked for any more."""
        self.policy, self.limits, self.is_spent = policy, limits, False
        self.pacing.limit(limits.mbit_up, limits.mbit_down)
        for host, port in list(self._asked):
            name, address = (host, None) if isinstance(host, str) else (None, host)
            if policy.judge(name, address, port).reason is not Reason.UNANSWERED:
                del self._asked[host, port]
        self.policy_changed.set()
        self.policy_changed = trio.Event()

    def ask(self, host: str | Address, port: int) -> float:
        """Return the time until which a connection waits for a decision. The daemon is asked, unless it was already.

        Raises:
            Refusal: too much is asked at one time. What nobody waits for any more counts to the end of its time, too.
        """
        now = trio.current_time()
        self._asked = {key: until for key, until in self._asked.items() if until > now}
        if (host, port) not in self._asked:
            if len(self._asked) >= MAX_ASKED:
                raise Refusal(Reason.LIMIT)
            self._asked[host, port] = now + self.limits.ask_s
            self.machine.report(EgressEntry(self.session_id, time.time(), "tcp", str(host), port, "asked"))
        return self._asked[host, port]

    def judge(self, name: str | None, address: Address | None, port: int) -> str | None:
        """Return the text of the rule that allows a connection, None if the mode does; raise Refusal."""
        decision = self.policy.judge(name, address, port)
        if not decision.is_allowed:
            raise Refusal(decision.reason or Reason.ERROR, decision.rule)
        return decision.rule

    def uses_at(self, name: str, port: int) -> tuple[SecretUse, ...]:
        """Return the secrets of the session that a connection to a port of a name may need."""
        return tuple(
            each.use
            for each in self.secrets
            if any(rule.is_for_name(name) and port in rule.ports for rule in each.rules)
        )

    def name_at(self, address: IPv4Address) -> SyntheticName | None:
        """Return the entry that an address stands for; None if it stands for none. One that a program has kept over a
        process stands for its name at once if there is a rule for that one name, and else when it is asked for."""
        found = self.names.find(address)
        if found is not None:
            return found
        names = (rule.host for rule in self.policy.allow if isinstance(rule.host, str) and rule.host[0] != "*")
        name = next((each for each in names if place_of(each) == address), None)
        return None if name is None else self.names.give(name)

    async def pin(self, entry: SyntheticName) -> Sequence[Address]:
        """Return the addresses of a name that may be dialled, looked up again if the last time is too long ago.

        Raises:
            NoSuchName, LookupFailed: as the resolver says.
            Refusal: the name has addresses, and none may be dialled; or the session has used up its bytes.
        """
        if entry.pinned_until <= trio.current_time():
            self.keep(entry, await self.find(entry.name))
        return entry.pinned

    def keep(self, entry: SyntheticName, addresses: Sequence[Address]) -> None:
        """Let connections to a name dial these addresses for a time."""
        entry.pinned, entry.pinned_until = addresses, trio.current_time() + PINNED_S

    async def find(self, name: str) -> Sequence[Address]:
        """Return the addresses of a name that may be dialled; none if it has no address at all. Raises as `pin`."""
        if self.is_spent:
            raise Refusal(Reason.LIMIT)
        found = await self.machine.resolver.resolve(name, self.share)
        good = tuple(address for address in found if self.machine.check.refusal(address) is None)
        if found and not good:
            raise Refusal(Reason.BAD_ADDRESS)
        return good

    def may_open(self) -> bool:
        """Tell whether one more connection is within the limits of the session and of the process.

        A session has at most as many as are left for all. So however many sessions take what they can get, there is
        some left for one that has none.
        """
        left = MAX_CONNECTIONS - self.machine.totals.connections_open
        return self.counters.connections_open < min(self.limits.connections, left) and not self.is_spent

    def spend(self, up: int, down: int) -> None:
        """Account for bytes that are about to go; beyond the session's limits raise Refusal and cut all."""
        for limit, bytes_then in (
            (self.limits.bytes_up, self.counters.bytes_up + up),
            (self.limits.bytes_down, self.counters.bytes_down + down),
        ):
            if limit is not None and bytes_then > limit:
                self.is_spent = True
                self.cut_all("limit")
                raise Refusal(Reason.LIMIT)
        for counts in (self.counters, self.machine.totals):
            counts.bytes_up += up
            counts.bytes_down += down
        self.machine.changed()
