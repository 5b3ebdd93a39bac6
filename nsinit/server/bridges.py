"""The bridges of sessions: which sessions have a link into the host's network, and orders to the bridge maker.

Owns the descriptor of the host's network namespace, opened before nsinit left it, and closed at once where sessions
get no bridges and none is left of an earlier nsinit. The set of links is what was found there at the start and what
was made since; the kernel removes a link with its session's network, and the end of the session removes its rules.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Generator
from dataclasses import dataclass, field

from nsinit.helpers import bridge_maker
from nsinit.helpers.bridge_maker import MakeBridge, RemoveBridge, SweepBridges
from nsinit.helpers.pool import HelperPool
from nsinit.log import log
from nsinit.sandbox import bridge
from nsinit.scheduler import Job, Wait
from nsinit.steps import StepFailed
from nsinit.wire.protocol import NETWORK_STAGE, BridgeRule, BridgeTerms

_RULES_ARE_LOADED = "/sys/module/nf_tables"
"""Directory that is missing where a question for rules would load a module, or where it is built in."""


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """The host's network: its namespace, -1 where nobody needs it, the node's links in it, and those that are gone and
    left rules."""

    fd: int
    names: bridge.NodeNames
    links: frozenset[str]
    lone_rules: frozenset[str]

    @classmethod
    def open(cls, node_id: str, terms: BridgeTerms | None) -> HostNetwork:
        """Open the namespace that this process is in. Raises `OSError`."""
        names = bridge.names_of(node_id)
        links, lone_rules = bridge.links_of(names), frozenset[str]()
        if terms is not None or links or os.path.exists(_RULES_ARE_LOADED):
            with contextlib.suppress(OSError):  # a kernel without them, or a nsinit that may not ask
                lone_rules = bridge.lone_rules_of(names)
        is_needed = terms is not None or bool(links | lone_rules)
        fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC) if is_needed else -1
        return cls(fd, names, links, lone_rules)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


@dataclass(slots=True)
class Bridges:
    """The bridges of one nsinit. `terms`: None where sessions get none."""

    makers: HelperPool
    host: HostNetwork
    terms: BridgeTerms | None
    _links: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._links = set(self.host.links)

    def has(self, session_id: str) -> bool:
        """Whether a session has a bridge, or may have what is left of one."""
        return self.host.names.link_of(session_id) in self._links

    def open(
        self, session_id: str, netns_fd: int, allow: tuple[BridgeRule, ...], deny: tuple[BridgeRule, ...]
    ) -> Generator[Wait, bool, str]:
        """Open a session's bridge, or change its rules; return the link. Raises `StepFailed`."""
        if self.terms is None:
            raise StepFailed(f"{NETWORK_STAGE}grant", "isolation.allow_bridge is false", errno=errno.EPERM)
        link = self.host.names.link_of(session_id)
        is_new = link not in self._links
        self._links.add(link)
        try:
            yield from self._order(MakeBridge(self.host.names.links, link, self.terms, allow, deny), netns_fd)
        except StepFailed:
            if is_new:
                yield from self.close(session_id)  # the bridge maker may have died with the link half made
            raise
        return link

    def close(self, session_id: str, netns_fd: int | None = None) -> Generator[Wait, bool, None]:
        """Remove a session's bridge, if it has one. `netns_fd`: the network of a session that lives on. Raises
        `StepFailed`, and then the bridge may be there."""
        if self.has(session_id):
            link = self.host.names.link_of(session_id)
            fds = () if netns_fd is None else (netns_fd,)
            yield from self._order(RemoveBridge(self.host.names.links, link), *fds)
            self._links.discard(link)

    def sweep(self, living: Collection[str]) -> Job:
        """Remove the links of sessions that an earlier nsinit made and that are gone, and their rules."""
        kept = {self.host.names.link_of(session_id) for session_id in living}
        if gone := (self._links | self.host.lone_rules) - kept:
            try:
                yield from self._order(SweepBridges(self.host.names.links, tuple(sorted(kept & self._links))))
            except StepFailed as error:
                log("error", "bridges are left", links=sorted(gone), reason=str(error))
                return
            self._links -= gone
            log("warning", "bridges removed", links=sorted(gone))

    def _order(self, order: bridge_maker.Order, *fds: int) -> Generator[Wait, bool, None]:
        """Have an order carried out; a second maker gets it if the first dies or hangs. Raises `StepFailed`."""
        self.makers.start_once()
        for _ in range(2):
            outcome = yield from self.makers.hand_over(order, [self.host.fd, *fds])
            yield Wait(event=outcome.done)
            if not outcome.has_died:
                break
        outcome.result()

    def stop(self) -> None:
        """End the helpers; bridges stay with their sessions."""
        self.makers.stop()
        self.host.close()
