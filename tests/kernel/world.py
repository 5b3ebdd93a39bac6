"""An outside world for the ways out of sessions: a network namespace with servers, and names for their addresses.

The egress process of a test runs in that namespace, with a hosts file of its own. The loopback device there carries
every address of the world, so nothing reaches a network of the machine. Sources: network_namespaces(7), hosts(5).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

import egress
from egress import protocol
from nsinit.cgroup.beside import name_cgroups, remove_cgroups
from nsinit.kernel import syscalls
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import StopOrder, open_tree
from sandkasten.config import Config
from sandkasten.config.seccomp import load_filters
from sandkasten.host import examine
from sandkasten.links.processes import ChildProcess, Ends, Role, start_as_child

T = TypeVar("T")

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000

Handler = Callable[[socket.socket], object]


class World:
    """The namespace of `world`, by its descriptor, with the names of its addresses."""

    def __init__(self, net_fd: int, hosts: Path, undo: ExitStack) -> None:
        self._net_fd, self._hosts, self._undo = net_fd, hosts, undo
        self.pids: dict[Role, int] = {}
        """The process of each role that was started last."""
        self.heard: list[tuple[str, int]] = []
        """The address and port of each connection that a server took."""

    def name(self, names: Mapping[str, str]) -> None:
        """Let each name have an address, for an egress process that asks from now on."""
        with self._hosts.open("a") as file:
            file.writelines(f"{address} {name}\n" for name, address in names.items())

    def serve(self, address: str, port: int, handle: Handler) -> None:
        """Answer each connection in a thread of its own, until the world ends."""
        listener = self._inside(lambda: socket.create_server((address, port)))
        self._undo.callback(listener.close)
        self._undo.callback(_end_accept, listener)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the world ends
                    return
                self.heard.append((address, port))
                threading.Thread(target=_answer, args=(connection, handle), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    async def start_egress(self, role: Role = "egress", path: Path | None = None, *words: str) -> ChildProcess:
        """Start a role of the program `egress` in the world; a `StartEgress`."""
        cgroups = name_cgroups(role)
        program = Path(egress.__file__).parent / "__main__.py"
        words = (*(f"cgroup={each}" for each in cgroups), *words)
        with Ends(path) as ends:
            process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond, in a test
                [sys.executable, "-I", "-B", str(program), role, *words],
                stdin=subprocess.DEVNULL,
                stderr=ends.log_write,
                pass_fds=(protocol.CHANNEL_FD,),
                preexec_fn=lambda: self._enter(ends.their_socket.fileno()),
            )
            self.pids[role] = process.pid
            self._undo.callback(remove_cgroups, cgroups)
            self._undo.callback(process.wait)
            self._undo.callback(process.kill)  # one that serves sessions outlives its daemon
            return ends.give(process.pid, os.pidfd_open(process.pid), cgroups=cgroups)

    @property
    def egress_pid(self) -> int:
        """The egress process that was started last."""
        return self.pids["egress"]

    def _enter(self, channel_fd: int) -> None:
        """Enter the namespace and see its hosts file, in a child about to execute a program."""
        os.dup2(channel_fd, protocol.CHANNEL_FD)
        syscalls.setns(self._net_fd, _CLONE_NEWNET)
        syscalls.unshare(_CLONE_NEWNS)
        syscalls.mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
        syscalls.mount(str(self._hosts), "/etc/hosts", flags=_MS_BIND)

    def _inside(self, work: Callable[[], T]) -> T:
        def enter_and_work() -> T:
            syscalls.setns(self._net_fd, _CLONE_NEWNET)
            return work()

        return _in_thread(enter_and_work)


@contextmanager
def world(directory: Path, *addresses: str) -> Iterator[World]:
    """Make a world with these addresses, and end its servers afterwards."""

    def make() -> int:
        syscalls.unshare(_CLONE_NEWNET)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for address in addresses:
            subprocess.run(["ip", "address", "add", address, "dev", "lo"], check=True)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    hosts.chmod(0o644)
    with ExitStack() as undo:
        net_fd = _in_thread(make)
        undo.callback(os.close, net_fd)
        yield World(net_fd, hosts, undo)


def _in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, done in a thread that may leave its namespaces and ends."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (found,) = outcome
    if isinstance(found, BaseException):
        raise found
    return found


def _answer(connection: socket.socket, handle: Handler) -> None:
    with connection:
        try:
            handle(connection)
        except OSError:  # the other end has gone
            pass


def _end_accept(listener: socket.socket) -> None:
    try:
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept(2), which `close` alone does not
    except OSError:
        pass


def http(body: bytes) -> Handler:
    """Return a server that answers each connection with one response."""

    def handle(connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (more := connection.recv(65536)):  # the other end has gone
                return
            head += more
        status = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
        connection.sendall(status + body)

    return handle


def echo(connection: socket.socket) -> None:
    """Send back each byte until the other end has sent its last."""
    while data := connection.recv(65536):
        connection.sendall(data)


@asynccontextmanager
async def served(config: Config, *, ends_sessions: bool = True) -> AsyncIterator[LocalSupervisor]:
    """Open a supervisor that has what the configuration allows on this machine."""
    machine = await trio.to_thread.run_sync(partial(examine.examine, config.data_dir, config=config))
    order = StopOrder(ends_sessions=ends_sessions)
    async with open_tree(config, machine, load_filters(config.security), start_as_child, order) as supervisor:
        yield supervisor
