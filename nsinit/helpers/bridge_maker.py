"""The bridge maker: a process that makes and removes links between sessions' networks and the host's
(`sandbox/bridge.py`).

A process of its own beside the network maker, and started by nobody unless the operator allows the mode `bridge` or a
link of an earlier nsinit is left: it is the one part of nsinit that has power over the host's network. The descriptor
of that network comes with each order, and is nsinit's to give. The bridge maker is a fork of the seed (`forker`) and
executes nothing: the mounts that nsinit keeps need not have the libraries of an interpreter.
Sources: setns(2), capabilities(7).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from nsinit.helpers.network_maker import work_on_networks
from nsinit.helpers.pool import HelperKind
from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.own_filters import BRIDGE_MAKER
from nsinit.sandbox import bridge
from nsinit.sandbox.builder_steps import BuildFacts
from nsinit.steps import StepFailed, Steps
from nsinit.wire import control
from nsinit.wire.protocol import NETWORK_STAGE, BridgeRule, BridgeTerms
from runner.wire.codec import Vocabulary

NAME = "nsinit-bridge"
"""The name in `/proc/<pid>/comm`."""


@dataclass(frozen=True, slots=True)
class MakeBridge:
    """Open a bridge, or give it other rules. Descriptors that come along: the host's network and the session's."""

    links: str
    link: str
    terms: BridgeTerms
    allow: tuple[BridgeRule, ...]
    deny: tuple[BridgeRule, ...]


@dataclass(frozen=True, slots=True)
class RemoveBridge:
    """Remove a bridge. Descriptors: the host's network, and the session's if it lives on."""

    links: str
    link: str


@dataclass(frozen=True, slots=True)
class SweepBridges:
    """Remove every bridge of the node but those of `kept`. Descriptor: the host's network."""

    links: str
    kept: tuple[str, ...]


Order = MakeBridge | RemoveBridge | SweepBridges
ORDERS = Vocabulary(MakeBridge, RemoveBridge, SweepBridges)


def kind_of(machine: BuildFacts, fork: Callable[[socket.socket], int]) -> HelperKind:
    """Return the kind of helper that bridge makers are. `fork` makes one of the seed. There is one, so that no two
    orders take one address."""

    def live_here(channel: socket.socket, parent_pid: int) -> NoReturn:
        live(channel, machine, parent_pid)

    return HelperKind("bridge maker", 1, ORDERS, live_here, fork)


def live(channel: socket.socket, machine: BuildFacts, parent_pid: int) -> NoReturn:
    """Serve until nsinit hangs up. Ends the process, always."""
    work_on_networks(channel, machine, parent_pid, NAME, BRIDGE_MAKER, ORDERS, _serve)


def _serve(order: Order, fds: list[int], home_fd: int) -> bytes:
    steps, names, (host_fd, *netns) = Steps(), bridge.NodeNames(order.links), fds
    try:
        with steps.step(f"{NETWORK_STAGE}bridge"):
            syscalls.setns(host_fd, k.CLONE_NEWNET)
            try:
                match order:
                    case MakeBridge():
                        what = order.terms, order.allow, order.deny
                        bridge.open_bridge(names, order.link, *what, netns_fd=netns[0], host_fd=host_fd)
                    case RemoveBridge():
                        bridge.close_bridge(names, order.link)
                        if netns:
                            bridge.forbid_pings(netns[0], host_fd)
                    case SweepBridges():
                        bridge.sweep(names, order.kept)
            finally:
                syscalls.setns(home_fd, k.CLONE_NEWNET)
    except StepFailed as error:
        return control.describe(error)
    return control.STATUS.encode(control.StepsDone(steps.timings_us))
