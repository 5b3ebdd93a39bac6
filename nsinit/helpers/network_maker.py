"""The network maker: a process that opens ways out of sessions' networks, and sockets in them (`sandbox/network.py`).

A process of its own, for three reasons. Foreign code runs in the namespaces that it enters, so it is none of the
builders', and enters the network alone: what has no file, no process and no memory of the session in it. The
descriptor that it gets is that namespace's and gives no other power over the session. And bpf(2) is a call that no
other process of ours may make: a filter is inherited, so the network maker is a fork of the seed (`forker`), which has
none, and not of nsinit.

For each order the network maker enters the namespace, works, goes back, and sends the descriptors over the socket that
came with the order. One that can't go back ends, and so does all that it held. If nsinit gave the order up, the
descriptors are closed with that socket. It is started when the first session wants a way out or a preview.
Sources: setns(2), bpf(2), capabilities(7); unix(7) SCM_RIGHTS.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from nsinit.helpers.pool import HelperKind
from nsinit.kernel import capabilities, syscalls
from nsinit.kernel import constants as k
from nsinit.kernel.files import keep_only
from nsinit.own_filters import NETWORK_MAKER, Part
from nsinit.sandbox.builder_steps import BuildFacts
from nsinit.sandbox.network import make_sockets, open_proxy, open_way_out
from nsinit.steps import StepFailed, Steps
from nsinit.wire import control
from nsinit.wire.protocol import MAX_DATAGRAM_BYTES, NETWORK_STAGE
from runner.wire.codec import Vocabulary

NAME = "nsinit-network"
"""The name in `/proc/<pid>/comm`."""
_CAPABILITIES = 1 << k.CAP_NET_ADMIN | 1 << k.CAP_SYS_ADMIN
_MAX_FDS = 2


@dataclass(frozen=True, slots=True)
class OpenWayOut:
    """Open a way out. Descriptors that come along: the network namespace, and a socket for those of the way out."""

    steers: bool = True


@dataclass(frozen=True, slots=True)
class MakeSockets:
    """Make `count` TCP sockets in a network. Descriptors as for `OpenWayOut`."""

    count: int


ORDERS = Vocabulary(OpenWayOut, MakeSockets)


def kind_of(machine: BuildFacts, fork: Callable[[socket.socket], int]) -> HelperKind:
    """Return the kind of helper that network makers are. `fork` makes one of the seed."""

    def live_here(channel: socket.socket, parent_pid: int) -> NoReturn:
        live(channel, machine, parent_pid)

    return HelperKind("network maker", 1, ORDERS, live_here, fork)


def live(channel: socket.socket, machine: BuildFacts, parent_pid: int) -> NoReturn:
    """Serve until nsinit hangs up. Ends the process, always."""
    work_on_networks(channel, machine, parent_pid, NAME, NETWORK_MAKER, ORDERS, _serve)


def work_on_networks(
    channel: socket.socket,
    machine: BuildFacts,
    parent_pid: int,
    name: str,
    part: Part,
    orders: Vocabulary,
    serve: Callable[[Any, list[int], int], bytes],
) -> NoReturn:
    """Live as `name`, under the filter of `part`, with capabilities for networks alone. For each order `serve` gets
    the order, the descriptors that came along, and that of the namespace to go back to; it returns the answer."""
    try:
        syscalls.end_with_parent(parent_pid)
        keep_only({0, 1, 2, channel.fileno()})
        syscalls.set_name(name)
        home_fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        # CAP_SETPCAP is what dropping the bounding set takes (prctl(2)); it goes with the next call.
        capabilities.keep_only(_CAPABILITIES | 1 << k.CAP_SETPCAP, machine.last_capability)
        syscalls.capset(_CAPABILITIES)
        if machine.parts is not None:
            machine.parts.enter(part)
        kept = {0, 1, 2, channel.fileno(), home_fd}
        channel.sendall(control.READY)
        while True:
            data, fds, _, _ = socket.recv_fds(channel, MAX_DATAGRAM_BYTES, _MAX_FDS)
            if not data:
                break
            answer = serve(orders.decode(data), fds, home_fd)
            keep_only(kept)  # before the answer: nothing of this way out is held here when its holder has it
            channel.sendall(answer)
    finally:
        os._exit(1)


def _serve(order: OpenWayOut | MakeSockets, fds: list[int], home_fd: int) -> bytes:
    steps, (netns_fd, answer_fd) = Steps(), fds
    try:
        with steps.step(f"{NETWORK_STAGE}namespace"):
            syscalls.setns(netns_fd, k.CLONE_NEWNET)
        try:
            if isinstance(order, MakeSockets):
                made = make_sockets(order.count)
            else:
                made = open_way_out(netns_fd) if order.steers else open_proxy()
        finally:
            syscalls.setns(home_fd, k.CLONE_NEWNET)
    except StepFailed as error:
        return control.describe(error)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=answer_fd) as answers:
        socket.send_fds(answers, [b"\0"], made)
    return control.STATUS.encode(control.StepsDone(steps.timings_us))
