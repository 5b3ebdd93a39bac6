"""Ends of programs, with a run cgroup and without; and the descriptor by which a program is born in its run cgroup."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nsinit.cgroup.tree import Located, locate
from nsinit.kernel.mountinfo import parse_mountinfo, parse_own_cgroups
from nsinit.wire.protocol import MakeRunCgroup, RemoveRunCgroup, RunCgroupMade
from runner.wire.protocol import (
    REQUESTS,
    BirthCgroup,
    Cancel,
    Done,
    Error,
    Exec,
    Kind,
    Membership,
    RunProgram,
    Signal,
    encode_frame,
)
from tests.kernel import harness
from tests.kernel.runner_harness import Client, Outcome, Sandbox, needs_namespaces, wait_until

pytestmark = needs_namespaces

STUBBORN = "trap '' INT TERM HUP; while :; do sleep 1234; done"
DAEMON = f'setsid sh -c "{STUBBORN}" & sh -c "sleep 1235 & exec sleep 1236" & '


def _located() -> Located:
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    return locate(mounts, parse_own_cgroups(Path("/proc/self/cgroup").read_text()))


LOCATED = _located()


@dataclass(frozen=True)
class OpenGroup:
    """A group as a request names it, and the descriptor that goes with it."""

    group: BirthCgroup | None = None
    fd: int = -1

    def send(self, client: Client, *argv: str, exec_id: str = "p", **options: Any) -> None:
        """Begin a program in the group."""
        send(client, RunProgram(exec_id, argv, group=self.group, **options), *([self.fd] if self.fd >= 0 else []))

    def run(self, client: Client, script: str, **options: Any) -> Outcome:
        self.send(client, "sh", "-c", script, **options)
        return client.outcome()


def send(client: Client, request: object, *fds: int) -> None:
    socket.send_fds(client.sock, [encode_frame(Kind.REQUEST, REQUESTS.encode(request))], list(fds))


@contextlib.contextmanager
def open_group(membership: Membership) -> Iterator[OpenGroup]:
    """Make a cgroup beneath this process's own and hold what a program is put into it by."""
    parent = {"clone": LOCATED.unified, "join": LOCATED.v1.get("pids")}[membership]
    if parent is None:
        pytest.skip(f"no cgroup hierarchy for {membership!r} here")
    name = f"sandkasten-{secrets.token_hex(4)}"
    directory = f"{parent}/{name}"
    os.mkdir(directory)
    path, flags = (directory, os.O_RDONLY) if membership == "clone" else (f"{directory}/tasks", os.O_WRONLY)
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield OpenGroup(BirthCgroup(name, membership), fd)
    finally:
        os.close(fd)
        wait_until(lambda: _was_removed(directory))


def _was_removed(directory: str) -> bool:
    with contextlib.suppress(OSError):
        os.rmdir(directory)
    return not os.path.exists(directory)


@pytest.fixture
def client(sandbox: Sandbox) -> Client:
    return sandbox.shell()


@pytest.fixture(params=["none", "clone", "join"])
def group(request: pytest.FixtureRequest, sandbox: Sandbox) -> Iterator[OpenGroup]:
    """Each way to keep a program's processes together; processes left in the group are killed with the sandbox."""
    if request.param == "none":
        yield OpenGroup()
        return
    with open_group(request.param) as opened:
        yield opened
        sandbox.shell().run("kill -9 -1")


def sleepers(client: Client) -> int:
    """Return how many processes sleep, seen by a program of their user."""
    client.request(RunProgram("count", ("sh", "-c", "ps -C sleep -o pid= | wc -l")))
    return int(client.outcome().stdout)


def test_a_time_limit_ends_all_it_started(client: Client, group: OpenGroup) -> None:
    """Daemons in sessions of their own that ignore signals end with the program; the shell is not touched."""
    client.run("x=1")
    reply = group.run(client, f"{DAEMON} {STUBBORN}", timeout_ms=300).reply
    assert (reply.exit_code, reply.signal, reply.cause) == (124, None, "timed_out")
    assert reply.duration_us >= 300_000
    assert sleepers(client) == 0
    assert client.stdout("echo $x") == b"1\n"


def test_a_time_limit_finds_daemons_of_a_program_that_obeys(client: Client, group: OpenGroup) -> None:
    """The program itself is gone at the first interrupt; what it left behind still ends before the reply."""
    script = f"{DAEMON} trap 'exit 0' INT; while :; do sleep 0.01; done"
    reply = group.run(client, script, timeout_ms=300).reply
    assert (reply.exit_code, reply.cause) == (124, "timed_out")
    assert sleepers(client) == 0


def test_cancelling_now_kills_at_once(sandbox: Sandbox, client: Client, group: OpenGroup) -> None:
    """A cancel with `now`, from another connection, kills at once: no process gets the time to clean up."""
    group.send(client, "sh", "-c", f"{DAEMON} trap 'echo bye' INT TERM; echo ready; {STUBBORN}")
    client.read_until(b"ready")
    other = sandbox.connect()
    assert other.ask(Cancel("p", now=True)) == Done()
    outcome = client.outcome()
    assert (outcome.reply.exit_code, outcome.reply.cause, outcome.stdout) == (130, "cancelled", b"")
    assert outcome.reply.duration_us < 10_000_000
    assert sleepers(client) == 0
    assert other.ask(Cancel("p")) == Error("NOT_RUNNING", "nothing runs as 'p'")


def test_cancelling_gives_it_time(client: Client, group: OpenGroup) -> None:
    """A cancel begins with an interrupt that the program can handle."""
    group.send(client, "sh", "-c", "trap 'echo bye; exit 7' INT; echo ready; while :; do sleep 0.01; done")
    client.read_until(b"ready")
    client.send(Kind.CANCEL)
    outcome = client.outcome()
    assert (outcome.reply.exit_code, outcome.reply.cause, outcome.stdout) == (130, "cancelled", b"bye\n")


def test_a_client_that_leaves_cancels(sandbox: Sandbox, client: Client, group: OpenGroup) -> None:
    """A run whose client has left is cancelled, with all processes of the program."""
    other = sandbox.connect()
    group.send(other, "sh", "-c", f"{DAEMON} echo ready; {STUBBORN}")
    other.read_until(b"ready")
    assert sleepers(client) > 0
    other.sock.close()
    wait_until(lambda: sleepers(client) == 0)


def test_sigkill_reaches_all_of_it(client: Client, sandbox: Sandbox, group: OpenGroup) -> None:
    """SIGKILL by id leaves no process of the program alive; the run ended by that signal and was not cancelled."""
    group.send(client, "sh", "-c", f"{DAEMON} echo ready; {STUBBORN}")
    client.read_until(b"ready")
    assert sandbox.connect().ask(Signal("p", signal.SIGKILL)) == Done()
    reply = client.outcome().reply
    assert (reply.exit_code, reply.signal, reply.cause) == (137, 9, "signalled")
    wait_until(lambda: sleepers(client) == 0)


def test_other_signals_reach_its_process_group(client: Client, sandbox: Sandbox, group: OpenGroup) -> None:
    """A trap runs, children of the same process group get it too, a daemon does not."""
    child = "sh -c 'trap \"echo child; exit\" USR1; >up; while :; do sleep 0.01; done' &"
    daemon = "setsid sh -c '>daemon; exec sleep 1234' &"
    until_up = "until [ -e up ] && [ -e daemon ]; do sleep 0.01; done"
    script = f"{daemon} {child} trap 'wait $!; exit 5' USR1; {until_up}; echo ready; wait $!; exit 6"
    group.send(client, "sh", "-c", script)
    client.read_until(b"ready")
    assert sandbox.connect().ask(Signal("p", signal.SIGUSR1)) == Done()
    outcome = client.outcome()
    assert (outcome.stdout, outcome.reply.exit_code) == (b"child\n", 5)
    assert sleepers(client) == 1


def test_a_fork_bomb_ends_with_its_program(client: Client, group: OpenGroup) -> None:
    """Processes that multiply up to the limit are all gone, and the next program works."""
    bomb = "import os, signal\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    group.send(client, "python3", "-c", bomb, timeout_ms=300)
    assert client.outcome().reply.cause == "timed_out"
    assert client.stdout("ps -C python3 -o pid= | wc -l") == b"0\n"


FORKS = """
import os, signal
try:
    while True:
        if os.fork() == 0:
            signal.pause()
except BlockingIOError:
    print("full", flush=True)
signal.pause()
"""


def test_a_user_with_too_many_processes_gets_no_other(sandbox: Sandbox, client: Client) -> None:
    """The limit holds for programs, too, and the program that used it up can be ended."""
    hog, last = sandbox.connect(), sandbox.connect()
    hog.request(RunProgram("hog", ("python3", "-c", FORKS)))
    hog.read_until(b"full")
    last.request(RunProgram("last", ("sh", "-c", "echo ready; exec sleep 1000")))
    last.read_until(b"ready")  # PID 1's own uid may fork: the limit counts from the next on
    outcome = OpenGroup().run(client, "true")
    assert (outcome.reply.exit_code, outcome.stderr) == (126, b"sandkasten: sh: Resource temporarily unavailable\n")
    assert client.ask(Cancel("hog", now=True)) == Done()
    assert hog.outcome().reply.cause == "cancelled"
    assert OpenGroup().run(client, "true").reply.exit_code == 0


def test_ending_one_spares_the_others(client: Client, sandbox: Sandbox, group: OpenGroup) -> None:
    """Jobs of the shell, and another program with its daemons, live on, also if they began later."""
    first = sandbox.connect()
    group.send(first, "sh", "-c", "echo ready; sleep 1234")
    first.read_until(b"ready")
    client.run("sleep 4321 & (setsid sleep 4322 &) ; true")
    second = sandbox.connect()
    second.request(RunProgram("second", ("sh", "-c", "sleep 4323 & echo ready; sleep 4324")))
    second.read_until(b"ready")
    wait_until(lambda: sleepers(client) == 5)  # a shell says that it is ready before it starts the last one
    assert sandbox.connect().ask(Cancel("p")) == Done()
    assert first.outcome().reply.cause == "cancelled"
    assert client.stdout("ps -C sleep -o args= | sort") == b"".join(b"sleep 432%d\n" % n for n in range(1, 5))


def test_a_timeout_of_a_shell_spares_programs(client: Client, sandbox: Sandbox, group: OpenGroup) -> None:
    """The time limit of a shell's command ends no program beside the shell, and no process of one."""
    group.send(client, "sh", "-c", "setsid sleep 4321 & echo ready; sleep 4322")
    client.read_until(b"ready")
    other = sandbox.connect()
    other.request(Exec("x", "sleep 1234", timeout_ms=100))
    assert other.outcome().reply.cause == "timed_out"
    assert sleepers(other) == 2


@pytest.mark.parametrize("membership", ["clone", "join"])
def test_it_is_born_in_its_group(client: Client, membership: Membership) -> None:
    """Program and children are in the cgroup from their first instruction; PID 1 and the shell are not."""
    with open_group(membership) as group:
        assert group.group is not None
        name = f"/{group.group.name}\n".encode()
        assert name in group.run(client, "cat /proc/self/cgroup").stdout
        assert name in group.run(client, "sh -c 'cat /proc/self/cgroup'").stdout
        assert name not in client.stdout("cat /proc/self/cgroup")


def test_a_group_that_is_gone_fails_the_start(client: Client) -> None:
    """The program does not run outside of its group instead."""
    with open_group("clone") as group:
        assert group.group is not None
        assert LOCATED.unified is not None
        os.rmdir(Path(LOCATED.unified, group.group.name))
        answer = group.run(client, "echo ran").reply
        assert answer == Error("IO_ERROR", "cannot start the program: No such file or directory")


def test_a_descriptor_of_something_else_fails_the_start(client: Client) -> None:
    """A descriptor of a plain directory, or of a file that can't be written, fails the program's start."""
    fd = os.open("/tmp", os.O_RDONLY)
    try:
        assert OpenGroup(BirthCgroup("g", "clone"), fd).run(client, "echo ran").reply.code == "IO_ERROR"
        outcome = OpenGroup(BirthCgroup("g", "join"), fd).run(client, "echo ran")
        assert (outcome.reply.exit_code, outcome.stdout) == (125, b"")
        assert outcome.stderr == b"sandkasten: cannot start sh: Bad file descriptor\n"
    finally:
        os.close(fd)


def test_a_group_without_its_descriptor_is_refused(client: Client) -> None:
    """A request that names a run cgroup without its descriptor is refused: the runner joins none by name."""
    assert OpenGroup(BirthCgroup("g", "clone")).run(client, "true").reply.code == "BAD_REQUEST"
    assert OpenGroup(BirthCgroup("../g", "none")).run(client, "true").reply.code == "BAD_REQUEST"


def test_descriptors_nobody_asked_for_are_closed(sandbox: Sandbox, client: Client) -> None:
    """Descriptors with a request that takes none, several at once, with input, with half a frame or at the connection's
    end are closed.
    """
    client.run("true")
    before = len(os.listdir(f"/proc/{sandbox.init_pid()}/fd"))
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        send(client, Exec("x", "true"), fd)
        client.outcome()
        send(client, RunProgram("p", ("true",)), fd)
        client.outcome()
        send(client, RunProgram("p", ("true",), group=BirthCgroup("g", "clone")), fd, fd)
        client.outcome()
        client.request(RunProgram("p", ("cat",), stdin=True))
        socket.send_fds(client.sock, [encode_frame(Kind.DATA, b"x")], [fd])
        client.send(Kind.END)
        assert client.outcome().stdout == b"x"
        client.request(RunProgram("p", ("true",), group=BirthCgroup("g", "join")))
        assert client.outcome().reply.code == "BAD_REQUEST"
        for part in (b"\0", b"\0\0\0\1\1", b"\0\0\0\2\1{}", b"\0\0\0\1\7"):
            other = sandbox.connect()
            socket.send_fds(other.sock, [part], [fd])
            other.sock.close()
    finally:
        os.close(fd)
    wait_until(lambda: len(os.listdir(f"/proc/{sandbox.init_pid()}/fd")) == before)


def test_a_descriptor_comes_with_a_frame_in_pieces(client: Client) -> None:
    """The descriptor comes with the first byte, and the request is complete only later."""
    with open_group("clone") as group:
        frame = encode_frame(
            Kind.REQUEST, REQUESTS.encode(RunProgram("p", ("cat", "/proc/self/cgroup"), group=group.group))
        )
        socket.send_fds(client.sock, [frame[:1]], [group.fd])
        client.sock.sendall(frame[1:20])
        client.sock.sendall(frame[20:])
        assert group.group is not None
        assert f"/{group.group.name}\n".encode() in client.outcome().stdout


def test_a_powerless_pid_1_starts_programs_in_groups() -> None:
    """In a real sandbox: nsinit makes the group, PID 1 has no capability over cgroups, the program is born in it."""
    with harness.data_directory() as data_dir, harness.running(data_dir) as server:
        box = server.build(harness.host_plan())
        answer, (fd,) = server.ask(MakeRunCgroup, session_id=box.session_id, name="g1")
        assert isinstance(answer, RunCgroupMade)
        group = OpenGroup(BirthCgroup("g1", answer.membership), fd)
        client = Client(harness.connect(data_dir, box.session_id))
        assert b"/g1\n" in group.run(client, "cat /proc/self/cgroup").stdout
        assert group.run(client, "setsid sleep 1234 & sleep 1235", timeout_ms=100).reply.cause == "timed_out"
        os.close(fd)
        server.ask(RemoveRunCgroup, session_id=box.session_id, name="g1")
        client.sock.close()
        box.teardown()
