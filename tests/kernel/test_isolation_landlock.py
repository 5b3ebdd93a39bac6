"""Landlock keeps signals and sockets inside, tried where no other wall would: in one network and one pid namespace."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsinit.kernel import constants as k
from nsinit.kernel import landlock, syscalls
from tests.kernel.harness import Sandbox, data_directory, host_plan, running

ABI = landlock.probe_abi()

needs_scopes = pytest.mark.skipif(ABI < landlock.SCOPES_ABI, reason=f"needs Landlock ABI 6, not {ABI}")
pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

PAIR_UP = """
import errno, os, signal, socket
name = b"\\0of this session"
server = socket.socket(socket.AF_UNIX); server.bind(name); server.listen()
child = os.fork()
if child == 0:
    client = socket.socket(socket.AF_UNIX); client.connect(name); client.sendall(b"hello")
    signal.pause()
print(server.accept()[0].recv(5).decode())
os.kill(child, signal.SIGUSR1)
print(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGUSR1)
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """One session for every claim here that needs one."""
    with data_directory() as data_dir, running(data_dir) as server:
        box = server.build(host_plan())
        yield box
        box.teardown()


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork; return 0, or the number of the error it raised."""
    pid = os.fork()
    if pid == 0:
        number = 255
        try:
            work()
            number = 0
        except OSError as error:
            number = error.errno or 255
        finally:
            os._exit(number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def confined(work: Callable[[], None]) -> int:
    """Run `work` in a fork that went through PID 1's own step; return as `in_child`."""

    def restricted() -> None:
        syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
        landlock.keep_inside(ABI)
        work()

    return in_child(restricted)


def listener() -> tuple[socket.socket, str]:
    """Return a listening abstract socket in the caller's network namespace, and its name."""
    server = socket.socket(socket.AF_UNIX)
    server.bind("")  # unix(7), autobind
    server.listen()
    return server, server.getsockname()


@needs_scopes
def test_a_confined_process_reaches_no_abstract_socket_outside() -> None:
    """An abstract socket outside the domain can't be connected to, in the same network namespace, by the same user,
    even by root.
    """
    server, name = listener()
    with server:
        connect = lambda: socket.socket(socket.AF_UNIX).connect(name)  # noqa: E731
        assert (in_child(connect), confined(connect)) == (0, 1)


@needs_scopes
def test_a_confined_process_signals_nobody_outside() -> None:
    """No signal, not even 0, reaches a process outside the domain, in the same pid namespace and with full
    capabilities.
    """
    parent = os.getpid()
    probe = lambda: os.kill(parent, 0)  # noqa: E731
    assert (in_child(probe), confined(probe)) == (0, 1)


@needs_scopes
def test_what_is_confined_together_is_not_kept_apart() -> None:
    """Abstract sockets and signals work among the processes of one domain."""

    def work() -> None:
        server, name = listener()
        child = os.fork()
        if child == 0:
            socket.socket(socket.AF_UNIX).connect(name)
            signal.pause()
        server.accept()
        os.kill(child, signal.SIGUSR1)
        if os.WTERMSIG(os.waitpid(child, 0)[1]) != signal.SIGUSR1:
            raise OSError(200, "the signal did not arrive")

    assert confined(work) == 0


@needs_scopes
def test_a_session_reaches_no_abstract_socket_of_its_own_network_from_outside(sandbox: Sandbox) -> None:
    """A listener outside, in the session's network namespace, is out of reach of its commands."""
    read_fd, write_fd = os.pipe()
    release_fd, hold_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hold_fd)
            syscalls.setns(os.open(f"/proc/{sandbox.pid}/ns/net", os.O_RDONLY), k.CLONE_NEWNET)
            server = socket.socket(socket.AF_UNIX)
            server.bind(b"\0outside")
            server.listen()
            os.write(write_fd, b"!")
            os.read(release_fd, 1)
        finally:
            os._exit(0)
    try:
        assert os.read(read_fd, 1) == b"!"
        script = "import socket; print(socket.socket(socket.AF_UNIX).connect_ex(b'\\0outside'))"
        assert sandbox.python(script) == "1"
    finally:
        for fd in (hold_fd, read_fd, write_fd, release_fd):
            os.close(fd)
        os.waitpid(pid, 0)


def test_abstract_sockets_and_signals_work_within_a_session(sandbox: Sandbox) -> None:
    """Abstract sockets, as X11 and D-Bus use them, and signals work within a session."""
    assert sandbox.python(PAIR_UP).split() == ["hello", "True"]


def test_the_kernels_version_is_reported(sandbox: Sandbox) -> None:
    """`Ready` reports the Landlock version, and the session was built with the Landlock step."""
    assert sandbox.owner.ready.features.items() >= landlock.features(ABI).items()
    assert "landlock" in sandbox.built.timings_us


def test_only_what_a_version_has_is_promised() -> None:
    """File rules need truncation (ABI 3), scopes ABI 6; below, neither is claimed."""
    seen = [tuple(landlock.features(abi).values()) for abi in (0, 2, 3, 5, 6)]
    assert seen == [(False, False), (False, False), (False, True), (False, True), (True, True)]


def test_an_older_kernel_is_let_through() -> None:
    """On a kernel without scopes PID 1 starts all the same: the other walls stand, and the feature is reported
    missing.
    """
    landlock.keep_inside(landlock.SCOPES_ABI - 1)
    assert Path("/proc/self/status").read_text()
    assert in_child(lambda: os.kill(os.getppid(), 0)) == 0
