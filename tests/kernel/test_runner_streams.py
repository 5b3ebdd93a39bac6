"""Output under pressure, leftovers of background jobs, hostile peers: PID 1 stays small, fair and alive."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from runner.loop.config import MAX_CONNECTIONS, MAX_LEFTOVER_PIPES
from runner.wire.protocol import MAX_REQUEST_BYTES, Exec, Hello, HelloReply, Kind, OpenShell, RunProgram, ShellInfo
from tests.kernel.runner_harness import Client, Sandbox, needs_namespaces, wait_until

pytestmark = needs_namespaces


def memory_kib(sandbox: Sandbox) -> int:
    """Return what PID 1 of the sandbox has in memory."""
    status = Path(f"/proc/{sandbox.init_pid()}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def descriptors(sandbox: Sandbox) -> int:
    return len(os.listdir(f"/proc/{sandbox.init_pid()}/fd"))


def test_a_hundred_megabytes_pass_in_bounded_memory(sandbox: Sandbox) -> None:
    """All of a large output arrives, and PID 1 does not grow by more than its buffer and some slack."""
    client = sandbox.shell()
    client.run("true")
    before = memory_kib(sandbox)
    client.begin("head -c 100000000 /dev/zero; head -c 5 /dev/zero >&2")
    sizes = {Kind.STDOUT: 0, Kind.STDERR: 0}
    while True:
        kind, body = client.next_frame()
        if kind not in sizes:
            break
        sizes[kind] += len(body)
    assert sizes == {Kind.STDOUT: 100_000_000, Kind.STDERR: 5}
    assert memory_kib(sandbox) - before < 4096


def test_a_reader_that_stopped_holds_up_only_itself(sandbox: Sandbox) -> None:
    """A client that never reads is no burden: other requests are served, memory stays, its time limit holds."""
    stalled, other = sandbox.shell(), sandbox.connect()
    before = memory_kib(sandbox)
    stalled.request(Exec("x", "head -c 50000000 /dev/zero; echo done >/tmp/finished; sleep 1234", timeout_ms=300))
    assert isinstance(other.ask(Hello()), HelloReply)
    assert other.stdout("test -e /tmp/finished || echo stopped") == b"stopped\n"  # after the stalled one's limit
    assert memory_kib(sandbox) - before < 4096
    outcome = stalled.outcome()
    assert outcome.reply.cause == "timed_out"
    assert 0 < len(outcome.stdout) < 50_000_000


def test_a_slow_reader_gets_everything_after_the_end(sandbox: Sandbox) -> None:
    """Output that waited in the pipe when the command ended comes before its reply, while the shell goes on."""
    slow, other = sandbox.shell(), sandbox.connect()
    slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.request(Exec("x", "head -c 500000 /dev/zero; touch ended"))
    assert other.stdout("ls") == b"ended\n"
    assert len(slow.outcome().stdout) == 500_000


ALTERNATING = "for i in 1 2 3 4 5; do echo e$i >&2; echo o$i; done"
IN_ORDER = b"".join(b"e%d\no%d\n" % (number, number) for number in range(1, 6))


@pytest.mark.parametrize("shell", ["bash", "sh", "busybox"])
def test_merged_streams_are_in_exact_order(sandbox: Sandbox, shell: str) -> None:
    """With `merged` all output of a command is standard output, in the order in which it was written, also when a
    program writes some of it, when it is more than a pipe holds, and of a child that has opened its stream again.
    """
    client = sandbox.shell(shell)
    for _ in range(20):
        outcome = client.run(ALTERNATING, merged=True)
        assert (outcome.stdout, outcome.stderr) == (IN_ORDER, b"")
    outcome = client.run("sh -c 'echo program >&2'; echo a; sh -c 'echo b >/dev/stderr'; echo c", merged=True)
    assert outcome.stdout == b"program\na\nb\nc\n"
    large = client.run("head -c 300000 /dev/zero; echo e >&2; head -c 300000 /dev/zero", merged=True)
    assert (large.stdout.index(b"e"), len(large.stdout)) == (300_000, 600_002)
    assert client.run("cat >&2", stdin=b"x" * 200_000, merged=True).stdout == b"x" * 200_000
    separate = client.run("echo e >&2; echo o")
    assert (separate.stdout, separate.stderr) == (b"o\n", b"e\n")


ONE_EACH = [("echo e >&2; echo o", b"eo"), ("echo o; echo e >&2", b"oe")]


def _order_of_frames(client: Client) -> bytes:
    """Return the first byte of each frame of output, up to the answer."""
    order = b""
    while True:
        kind, body = client.next_frame()
        if kind in (Kind.STDOUT, Kind.STDERR):
            order += body[:1]
        elif kind is not Kind.STARTED:
            return order


@pytest.mark.parametrize(("command", "order"), ONE_EACH, ids=["error-first", "output-first"])
@pytest.mark.parametrize("shell", ["bash", "sh", "busybox"])
def test_the_stream_that_is_written_first_comes_first(sandbox: Sandbox, shell: str, command: str, order: bytes) -> None:
    """Two streams of a short command: in the session's shell and in a named one, plain, with a variable, and of one
    that goes on for longer than PID 1 looks away."""
    client = sandbox.shell(shell)
    assert isinstance(client.ask(OpenShell("other", shell=shell)), ShellInfo)
    for _ in range(20):
        for request in (
            Exec("x", command),
            Exec("x", command, shell="other"),
            Exec("x", command, env={"A": "1"}),
            Exec("x", f"{command}; sleep 0.003"),
        ):
            client.request(request)
            assert _order_of_frames(client) == order


@pytest.mark.parametrize(("command", "order"), ONE_EACH, ids=["error-first", "output-first"])
def test_the_stream_that_a_program_writes_first_comes_first(sandbox: Sandbox, command: str, order: bytes) -> None:
    """PID 1 looks at both pipes before there is a process, whatever shell the session has."""
    client = sandbox.connect()
    for _ in range(100):
        client.request(RunProgram("p", ("/bin/sh", "-c", command)))
        assert _order_of_frames(client) == order


def test_merged_streams_of_a_program_are_in_exact_order(client: Client) -> None:
    """A program's two descriptors are one pipe."""
    for _ in range(20):
        client.request(RunProgram("p", ("/bin/sh", "-c", ALTERNATING), merged=True))
        outcome = client.outcome()
        assert (outcome.stdout, outcome.stderr) == (IN_ORDER, b"")


def test_two_streams_come_in_order_if_there_is_a_moment_between(client: Client) -> None:
    """Separate streams of a command that goes on are read as output comes."""
    client.request(Exec("x", "sleep 0.1; echo e1 >&2; sleep 0.1; echo o1; sleep 0.1; echo e2 >&2"))
    frames = [client.next_frame() for _ in range(4)]
    assert frames[1:] == [(Kind.STDERR, b"e1\n"), (Kind.STDOUT, b"o1\n"), (Kind.STDERR, b"e2\n")]


def test_background_output_never_reaches_a_later_command(client: Client) -> None:
    """Output of a job after its command's end belongs to no other command, and does not kill the job."""
    client.run("mkfifo go; { cat go; echo stray; echo stray >&2; echo $? >status; } &")
    outcome = client.run("echo x >go; while ! test -s status; do sleep 0.01; done; echo mine", timeout_ms=15_000)
    assert (outcome.stdout, outcome.stderr) == (b"mine\n", b"")
    assert client.stdout("cat status") == b"0\n"


def test_background_output_does_not_block_its_job(client: Client) -> None:
    """A job that writes more than a pipe holds after its command ended gets on."""
    client.run("mkfifo go; { cat go; head -c 3000000 /dev/zero; echo written >status; } &")
    client.run("echo x >go; while ! test -s status; do sleep 0.01; done", timeout_ms=15_000)
    assert client.stdout("cat status") == b"written\n"


def test_a_noisy_job_does_not_hold_up_replies(client: Client) -> None:
    """A job that writes without end delays neither the reply of its own command nor others."""
    assert client.run("yes & echo $! >pid", timeout_ms=15_000).reply.cause == "exited"
    assert client.run("echo mine", timeout_ms=15_000).stdout == b"mine\n"
    assert client.run("kill $(cat pid)", timeout_ms=15_000).reply.exit_code == 0


def test_leftover_pipes_are_bounded(sandbox: Sandbox) -> None:
    """Jobs that keep their output open cost PID 1 a bounded number of descriptors."""
    client = sandbox.shell("/bin/dash")
    client.run("true")  # opens the clock of the shell, which stays open
    before = descriptors(sandbox)
    for _ in range(MAX_LEFTOVER_PIPES):
        client.run("sleep 1234 &")
    assert before + MAX_LEFTOVER_PIPES - 2 <= descriptors(sandbox) <= before + MAX_LEFTOVER_PIPES + 2


def test_descriptors_do_not_pile_up(sandbox: Sandbox) -> None:
    """Commands, files and connections leave no descriptor behind."""
    client = sandbox.shell()
    client.run("true")
    client.read_file("missing")
    before = descriptors(sandbox)
    for _ in range(30):
        client.run("true", stdin=b"x", env={"A": "1"}, cwd="/tmp")
        client.run("exit 1")
        client.write_file("f", b"x")
        client.read_file("f")
        client.read_file("missing")
        sandbox.connect().sock.close()
    client.run("true")
    wait_until(lambda: descriptors(sandbox) <= before)


# Peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">IB", MAX_REQUEST_BYTES + 1, Kind.REQUEST),
        struct.pack(">IB", 2, Kind.REQUEST) + b"{}",
        struct.pack(">IB", 3, Kind.REQUEST) + b"\xff{}",
        struct.pack(">IB", 0, Kind.STDOUT),
        struct.pack(">IB", 0, 0xFF),
    ],
)
def test_a_malformed_frame_costs_its_connection_only(sandbox: Sandbox, garbage: bytes) -> None:
    """A peer that breaks the protocol is closed; others are served."""
    other, bad = sandbox.shell(), sandbox.connect()
    bad.sock.sendall(garbage)
    assert bad.sock.recv(1) == b""
    assert other.stdout("echo fine") == b"fine\n"


def test_two_requests_at_once_are_refused(sandbox: Sandbox) -> None:
    """A second request on a busy connection breaks the contract: closed, and the first is cancelled."""
    client, other = sandbox.shell(), sandbox.connect()
    client.begin("sleep 1234", timeout_ms=60_000)
    client.request(Hello())
    assert client.sock.recv(1) == b""
    assert other.stdout("echo fine", timeout_ms=10_000) == b"fine\n"


def test_requests_may_follow_in_one_write(sandbox: Sandbox) -> None:
    """A request sent before the reply to the last one was read is answered in turn, if that one is done."""
    client = sandbox.shell()
    for _ in range(50):
        client.request(Hello())
        assert isinstance(client.next_message(), HelloReply)


def test_bytes_may_come_one_at_a_time(sandbox: Sandbox) -> None:
    """Frames are found however the stream is cut."""
    from runner.wire.protocol import REQUESTS, encode_frame

    client = sandbox.shell()
    for byte in encode_frame(Kind.REQUEST, REQUESTS.encode(Exec("x", "echo hi"))):
        client.sock.sendall(bytes([byte]))
    assert client.outcome().stdout == b"hi\n"


def test_connections_are_bounded(sandbox: Sandbox) -> None:
    """Beyond the limit a connection is closed; when one leaves, there is room again."""
    clients = []
    for _ in range(MAX_CONNECTIONS):
        clients.append(sandbox.connect())
        assert isinstance(clients[-1].ask(Hello()), HelloReply)
    assert sandbox.connect().sock.recv(1) == b""
    clients[0].sock.close()

    def is_served() -> bool:
        try:
            return isinstance(sandbox.connect().ask(Hello()), HelloReply)
        except ConnectionError:
            return False

    wait_until(is_served)
