"""Ports of a real sandbox, with a network of its own: what a watcher is told, and when nobody looks any more."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.server.ports import LONGEST_PAUSE_S, MAX_LISTENERS
from runner.wire.protocol import ANSWERS, Done, Kind, PortClosed, PortOpened, RunProgram, Setup, Watch
from tests.kernel.harness import Nsinit, Sandbox, data_directory, host_plan, running, wait_until
from tests.kernel.harness import connect as connect_to
from tests.kernel.runner_harness import Client
from tests.waiting import patience

SERVER = """
import socket, sys, signal
sockets = []
for line in sys.stdin:
    verb, host, port = line.split()
    if verb == "open":
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        each = socket.socket(family)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        each.bind((host, int(port)))
        each.listen()
        sockets.append(each)
    elif verb == "bind":
        each = socket.socket()
        each.bind((host, int(port)))
        sockets.append(each)
    elif verb == "many":
        for number in range(int(port)):
            sockets.append(socket.create_server((host, 20000 + number)))
    else:
        sockets.pop().close()
    print("done", flush=True)
"""


@dataclass
class Watched:
    """A sandbox, a connection for commands and one that watches."""

    box: Sandbox
    commands: Client
    events: Client
    data_dir: Path

    def next_event(self) -> Any:
        kind, body = self.events.next_frame()
        assert kind is Kind.EVENT
        return ANSWERS.decode(body)

    def connect(self) -> Client:
        return Client(connect_to(self.data_dir, self.box.session_id))

    def tell_server(self, verb: str, host: str = "0.0.0.0", port: int = 0) -> None:
        """Make the server that `serve` started do something and wait until it has."""
        self.commands.send(Kind.DATA, f"{verb} {host} {port}\n".encode())
        self.commands.read_until(b"done")

    def serve(self) -> None:
        self.commands.request(RunProgram("server", ("python3", "-c", SERVER), stdin=True))

    def cpu_ns(self) -> int:
        """Return how much CPU PID 1 has had."""
        return int(Path(f"/proc/{self.box.pid}/schedstat").read_text().split()[0])


@pytest.fixture
def watched() -> Iterator[Watched]:
    with data_directory() as data_dir, running(data_dir) as server, watching(server) as watched:
        yield watched


@contextmanager
def watching(server: Nsinit) -> Iterator[Watched]:
    box = server.build(host_plan())
    clients = [Client(connect_to(server.data_dir, box.session_id)) for _ in range(2)]
    clients[0].ask(Setup())
    clients[1].request(Watch())
    kind, _ = clients[1].next_frame()
    assert kind is Kind.STARTED
    try:
        yield Watched(box, clients[0], clients[1], server.data_dir)
    finally:
        for client in clients:
            client.sock.close()
        box.teardown()


@pytest.mark.parametrize(("host", "other"), [("0.0.0.0", "::"), ("127.0.0.1", "127.0.0.2"), ("::", "0.0.0.0")])
def test_a_port_is_told_when_it_opens_and_closes(watched: Watched, host: str, other: str) -> None:
    """An open port is reported with the address that it is bound to; the same port of another address is another
    listener.
    """
    watched.serve()
    watched.tell_server("open", host, 8080)
    assert watched.next_event() == PortOpened(8080, host)
    watched.tell_server("open", other, 8080)
    assert watched.next_event() == PortOpened(8080, other)
    watched.tell_server("close")
    assert watched.next_event() == PortClosed(8080, other)
    watched.commands.send(Kind.CANCEL)
    assert watched.next_event() == PortClosed(8080, host)


def test_it_is_told_soon(watched: Watched) -> None:
    """While a command runs a port is reported at once."""
    watched.serve()
    for port in range(5000, 5005):
        began_s = time.monotonic()
        watched.tell_server("open", port=port)
        assert watched.next_event() == PortOpened(port, "0.0.0.0")
        assert time.monotonic() - began_s < patience(1)


def test_only_listeners_are_told(watched: Watched) -> None:
    """A port that is bound and not listened on, and connections, are not reported."""
    watched.serve()
    watched.tell_server("bind", port=7000)
    watched.tell_server("open", port=7001)
    assert watched.next_event() == PortOpened(7001, "0.0.0.0")
    other = watched.connect()
    other.request(RunProgram("c", ("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7001; echo connected")))
    assert other.outcome().stdout == b"connected\n"
    watched.tell_server("open", port=7002)
    assert watched.next_event() == PortOpened(7002, "0.0.0.0")
    other.sock.close()


def test_a_job_that_outlives_its_command_is_still_seen(watched: Watched) -> None:
    """A server in the background of the shell opens its port after the command; and a server that dies closes it."""
    server = "import socket, time; time.sleep(0.5); s = socket.create_server(('', 6000)); time.sleep(1000)"
    watched.commands.run(f'python3 -c "{server}" & echo $! >/tmp/pid')
    assert watched.next_event() == PortOpened(6000, "0.0.0.0")
    watched.commands.run("kill $(cat /tmp/pid)")
    assert watched.next_event() == PortClosed(6000, "0.0.0.0")


def test_what_is_open_already_is_told_first(watched: Watched) -> None:
    """A later watcher gets the open ports at once; each watcher gets every change."""
    watched.serve()
    watched.tell_server("open", port=7000)
    watched.next_event()
    late = watched.connect()
    late.request(Watch())
    assert late.next_frame()[0] is Kind.STARTED
    assert ANSWERS.decode(late.next_frame()[1]) == PortOpened(7000, "0.0.0.0")
    watched.tell_server("close")
    assert watched.next_event() == ANSWERS.decode(late.next_frame()[1]) == PortClosed(7000, "0.0.0.0")
    late.send(Kind.CANCEL)
    assert late.next_message() == Done()
    assert late.stdout("echo next") == b"next\n"
    late.sock.close()


def test_more_ports_than_anybody_needs(watched: Watched) -> None:
    """A bounded number is told, and the sandbox works on."""
    watched.serve()
    watched.tell_server("many", port=MAX_LISTENERS + 100)
    assert [watched.next_event().port for _ in range(MAX_LISTENERS)] == list(range(20000, 20000 + MAX_LISTENERS))
    watched.tell_server("close")
    watched.commands.send(Kind.CANCEL)
    assert watched.commands.outcome().reply.cause == "cancelled"
    assert {type(watched.next_event()) for _ in range(MAX_LISTENERS)} == {PortClosed}


def test_the_table_of_connections_is_the_sessions_own(watched: Watched) -> None:
    """A look or the end of a network walks 1024 buckets, and not the machine's (up to 262,144)."""
    own = "/proc/sys/net/ipv4/tcp_ehash_entries"  # negative where the table is the machine's; ip-sysctl.rst
    if not Path(own).exists():
        pytest.skip("this kernel has one table of connections: it is older than Linux 6.1")
    assert watched.commands.stdout(f"cat {own}") == b"1024\n"


def test_nobody_looks_while_nothing_lives(watched: Watched) -> None:
    """With only an idle shell PID 1 does not run at all; the next command wakes it."""
    watched.commands.run("true")

    def is_quiet() -> bool:
        before = watched.cpu_ns()
        with contextlib.suppress(TimeoutError):
            watched.events.sock.settimeout(LONGEST_PAUSE_S + 0.5)
            watched.events.next_frame()
        return watched.cpu_ns() == before

    wait_until(is_quiet, "PID 1 rests")
    watched.events.sock.settimeout(patience(20))
    watched.serve()
    watched.tell_server("open", port=7000)
    assert watched.next_event() == PortOpened(7000, "0.0.0.0")


NO_SOCK_DIAG = """
import errno, os, sys
sys.path.insert(0, sys.argv[1])
from nsinit.kernel.seccomp.bpf import encode
from nsinit.kernel.seccomp.compile import compile_list
from nsinit.kernel.seccomp.filters import ARCH
from nsinit.kernel.seccomp.profile import ArgTest, Rule
from nsinit.kernel.seccomp.table import NUMBERS
from nsinit.kernel.syscalls import FilterProgram, set_filter
args = ArgTest(0, "eq", 16), ArgTest(2, "eq", 4)
rule = Rule(("socket",), "errno", errno.EPROTONOSUPPORT, args)
set_filter(FilterProgram(encode(compile_list(NUMBERS[ARCH], ARCH, rules=[rule]))))
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Makes the kernel one without CONFIG_INET_DIAG for the program that it executes."""


def test_a_kernel_without_sock_diag_still_tells_of_ports() -> None:
    """PID 1 reads the tables of its network instead, and tells the same."""
    root = str(Path(__file__).parents[2])
    wrapper = (sys.executable, "-I", "-c", NO_SOCK_DIAG, root)
    ask = "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)"
    refused = subprocess.run([*wrapper, sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert "Protocol not supported" in refused.stderr
    with data_directory() as data_dir, running(data_dir, wrapper=wrapper) as server, watching(server) as watched:
        watched.serve()
        watched.tell_server("open", port=8000)
        assert watched.next_event() == PortOpened(8000, "0.0.0.0")
        watched.tell_server("close")
        assert watched.next_event() == PortClosed(8000, "0.0.0.0")
