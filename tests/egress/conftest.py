"""Network namespaces of the egress tests, and the fixture to be in one; that takes root."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from trio._core import _thread_cache

from nsinit.kernel import constants as k
from nsinit.kernel import netlink, syscalls
from nsinit.sandbox.network import loopback_up
from tests.waiting import patience

OWN = "45.33.32.156"
_LO = 1
_NEED_NO_ROOT = {"test_protocol.py", "test_names.py"}


def present_network() -> int:
    """Return a descriptor of this thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def new_network() -> Iterator[int]:
    """Be in a new network namespace, given as a descriptor; be back in the old one afterwards."""
    back = present_network()
    try:
        syscalls.unshare(k.CLONE_NEWNET)
        here = present_network()
        try:
            loopback_up()
            yield here
        finally:
            os.close(here)
            syscalls.setns(back, k.CLONE_NEWNET)
    finally:
        os.close(back)


@contextmanager
def world() -> Iterator[None]:
    """Be where every address is local; `OWN` is an address of an interface, as the host's own are."""
    with new_network():
        kind = 0, 0, 0, 255, 4, 254, 2, 0  # table local, static, scope host, type local
        lo = netlink.attribute(4, struct.pack("=I", _LO))
        requests = b"".join(
            netlink.message(netlink.RTM_NEWROUTE, struct.pack("=8BI", family, *kind) + lo, netlink.NLM_F_CREATE)
            for family in (socket.AF_INET, socket.AF_INET6)
        )
        assert netlink.ask(netlink.NETLINK_ROUTE, requests, 2) == [0, 0]
        add_own_address(OWN)
        with _threads_that_end():
            yield


@contextmanager
def _threads_that_end() -> Iterator[None]:
    """Wait, at the end, for the threads that began in the present network: trio keeps an idle thread for ten seconds
    for whoever asks next, who would then be in a network that is not theirs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_thread_cache, "IDLE_TIMEOUT", 0.01)
        yield
        until = time.monotonic() + patience()
        while threads := _other_threads_here():
            assert time.monotonic() < until, f"threads {threads} stay in the network of the test"
            time.sleep(0.01)


def _other_threads_here() -> list[str]:
    """Return the ids of the threads of this process that are in this thread's network."""
    here, others = os.readlink("/proc/thread-self/ns/net"), []
    for thread in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):
            if thread != str(threading.get_native_id()) and os.readlink(f"/proc/self/task/{thread}/ns/net") == here:
                others.append(thread)
    return others


def add_own_address(text: str) -> None:
    """Give the loopback of the present namespace one more address."""
    value = socket.inet_aton(text)
    body = struct.pack("=4BI", socket.AF_INET, 32, 0, 0, _LO)
    body += netlink.attribute(2, value) + netlink.attribute(1, value)
    assert netlink.ask(netlink.NETLINK_ROUTE, netlink.message(netlink.RTM_NEWADDR, body, netlink.NLM_F_CREATE)) == [0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests in namespaces where there can be none."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and item.path.name not in _NEED_NO_ROOT:
            item.add_marker(pytest.mark.kernel)
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture
def outside() -> Iterator[None]:
    """Be in a network of the test's own."""
    with world():
        yield
