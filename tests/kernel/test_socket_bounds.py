"""The bound on a session's sockets: PID 1 counts, says no above it, and stands in the way of nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nsinit.helpers.builder import sockets_in
from nsinit.wire.protocol import Ready
from tests.kernel.harness import ROOMY, Nsinit, Sandbox, host_plan

LIMITS = replace(ROOMY, memory_bytes=128 << 20)
MOST = sockets_in(LIMITS.memory_bytes)
MAKE = """
import errno, json, os, resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
keep, said = [], {}
def until_refused(*kind):
    try:
        for made in range(4000):
            keep.append(socket.socket(*kind))
    except OSError as error:
        return made, errno.errorcode[error.errno]
    return 4000, "none"
"""


@pytest.fixture
def sandbox(server: Nsinit) -> Iterator[Sandbox]:
    box = server.build(host_plan(limits=LIMITS))
    yield box
    box.teardown()


def _said(box: Sandbox, script: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(box.python(f"{MAKE}\n{script}\nprint(json.dumps(said))"))
    return said


@pytest.mark.parametrize("kind", ["AF_INET, socket.SOCK_DGRAM", "AF_INET6, socket.SOCK_DGRAM", "AF_NETLINK, 3, 0"])
def test_datagram_and_netlink_sockets_are_bounded(sandbox: Sandbox, kind: str) -> None:
    """The first above the bound is ENOBUFS, bound to a port or not; one that is closed makes room for another."""
    said = _said(
        sandbox,
        f"""
said["first"] = until_refused(socket.{kind})
for each in keep[:7]:
    each.close()
said["again"] = until_refused(socket.AF_INET, socket.SOCK_DGRAM)
""",
    )
    assert said == {"first": [MOST, "ENOBUFS"], "again": [7, "ENOBUFS"]}


def test_all_internet_sockets_are_bounded_and_accepted_ones_count(sandbox: Sandbox) -> None:
    """Eight times as many connections as datagram sockets; Unix sockets are charged to the session and don't count."""
    said = _said(
        sandbox,
        """
unix = [socket.socketpair() for _ in range(1000)]
listener = socket.create_server(("127.0.0.1", 0), backlog=4)
try:
    while True:
        keep.append(socket.create_connection(listener.getsockname()))
        keep.append(listener.accept()[0])
except OSError as error:
    said["refused"] = len(keep) + 1, errno.errorcode[error.errno]
""",
    )
    made, reason = said["refused"]
    assert reason == "ENOBUFS"
    assert 8 * MOST <= made <= 8 * MOST + 1  # the last connection takes two


@pytest.mark.parametrize("profile", ["debug", "mvp"])
def test_the_bound_holds_under_the_other_profiles(server: Nsinit, profile: str) -> None:
    """PID 1 counts below every filter, not below `strict` alone."""
    box = server.build(host_plan(limits=LIMITS, seccomp=profile))
    said = _said(box, 'said["first"] = until_refused(socket.AF_INET, socket.SOCK_DGRAM)')
    box.teardown()
    assert said == {"first": [MOST, "ENOBUFS"]}


@pytest.mark.parametrize("profile", ["strict", "debug", "mvp"])
def test_below_every_profile_a_buffer_stays_small_and_a_foreign_family_is_refused(server: Nsinit, profile: str) -> None:
    """SO_SNDBUF, SO_RCVBUF and SO_TIMESTAMPING succeed without effect; other options have theirs."""
    box = server.build(host_plan(limits=LIMITS, seccomp=profile))
    said = _said(
        box,
        """
made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 37):
    before = made.getsockopt(socket.SOL_SOCKET, option)
    made.setsockopt(socket.SOL_SOCKET, option, 0x302)
    said[str(option)] = made.getsockopt(socket.SOL_SOCKET, option) == before
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
said["reuse"] = made.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
for family in (15, 17, 38, 40, 44):
    try:
        socket.socket(family, socket.SOCK_RAW, 0).close()
    except OSError as error:
        said[str(family)] = errno.errorcode[error.errno]
""",
    )
    box.teardown()
    assert said == {"7": True, "8": True, "37": True, "reuse": 1} | dict.fromkeys(
        ("15", "17", "38", "40", "44"), "EPERM"
    )


def test_many_callers_at_once_are_all_answered(sandbox: Sandbox) -> None:
    """Processes that ask at the same time, some killed while they wait, leave PID 1 and its answers in order."""
    said = _said(
        sandbox,
        """
import signal, time
children = []
for number in range(16):
    pid = os.fork()
    if pid == 0:
        for _ in range(200 if number % 2 else 10**9):
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
        os._exit(0)
    children.append(pid)
time.sleep(0.3)
for pid in children[::2]:
    os.kill(pid, signal.SIGKILL)
said["ends"] = sorted(set(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
said["then"] = until_refused(socket.AF_INET, socket.SOCK_DGRAM)
""",
    )
    assert said == {"ends": [-9, 0], "then": [MOST, "ENOBUFS"]}


def test_programs_that_look_at_the_network_work(sandbox: Sandbox) -> None:
    """The C library's `if_nameindex` and resolver, and `ip`, ask netlink and get an answer."""
    script = "import socket; print(socket.if_nameindex(), socket.getaddrinfo('127.0.0.1', 80)[0][4])"
    assert sandbox.run(f'python3 -c "{script}"').out == "[(1, 'lo')] ('127.0.0.1', 80)\n"
    found = sandbox.run("command -v ip >/dev/null && ip addr || echo none").out
    assert found == "none\n" or "127.0.0.1" in found


def test_v1_limits_what_waits_in_sockets(server: Nsinit, sandbox: Sandbox) -> None:
    """Where v1 counts the memory of sockets, a session has a quarter of its memory limit for it."""
    assert isinstance(server.ready, Ready)
    if server.ready.cgroup_mode == "v2":
        pytest.skip("v2 charges sockets to the session's memory itself")
    directory = f"{server.ready.cgroup_dirs['memory']}/{sandbox.session_id}"
    with open(f"{directory}/memory.kmem.tcp.limit_in_bytes") as file:
        assert int(file.read()) == LIMITS.memory_bytes // 4
