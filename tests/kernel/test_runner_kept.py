"""Runs with a ticket: they outlive their connection, and another one goes on where it left off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.server.kept import MAX_ENDED_RUNS
from runner.wire.protocol import (
    Attached,
    AttachRun,
    Done,
    Error,
    Exec,
    ExecReply,
    ForgetRuns,
    Kind,
    ListRuns,
    RunEntry,
    RunList,
    RunProgram,
)
from tests.kernel.runner_harness import Client, Sandbox, needs_namespaces, wait_until

pytestmark = needs_namespaces

TICKET = "what the daemon wants to be told again"
FLOOD_BYTES = 4_000_000


@pytest.fixture
def client(sandbox: Sandbox) -> Client:
    connection = sandbox.shell()
    connection.run("mkfifo /tmp/go")
    return connection


def begin(client: Client, exec_id: str, command: str, **options: Any) -> None:
    client.request(Exec(exec_id, command, ticket=TICKET, **options))
    kind, body = client.next_frame()
    assert kind is Kind.STARTED, body


def attach(client: Client, exec_id: str, stdout: int = 0, stderr: int = 0) -> tuple[Any, bytes, Any]:
    """Return what came first, the standard output, and the final answer."""
    first = client.ask(AttachRun(exec_id, stdout, stderr))
    if not isinstance(first, Attached):
        return first, b"", None
    outcome = client.outcome()
    return first, outcome.stdout, outcome.reply


def entries(client: Client) -> dict[str, RunEntry]:
    found: dict[str, RunEntry] = {}
    after, more = 0, True
    while more:
        answer = client.ask(ListRuns(after))
        assert isinstance(answer, RunList)
        found |= {entry.exec_id: entry for entry in answer.runs}
        after, more = max((entry.number for entry in answer.runs), default=0), answer.more
    return found


def let_go(client: Client) -> None:
    """Let a command go on that waits with `read line </tmp/go`."""
    client.request(RunProgram("go", command="echo x >/tmp/go"))
    assert isinstance(client.outcome().reply, ExecReply)


def has_ended(client: Client, exec_id: str) -> bool:
    return entries(client)[exec_id].has_ended


def test_a_run_goes_on_when_its_connection_breaks(sandbox: Sandbox, client: Client) -> None:
    """The next connection gets the run's true end and all of its output, including what the first connection had
    received.
    """
    begin(client, "a", "echo one; read line </tmp/go; echo two; exit 3")
    client.read_until(b"one\n")
    client.sock.close()
    other = sandbox.connect()
    number = entries(other)["a"].number
    assert entries(other) == {"a": RunEntry(number, "a", TICKET, has_begun=True, has_ended=False, input_ended=True)}
    let_go(other)
    wait_until(lambda: has_ended(other, "a"))
    first, stdout, reply = attach(other, "a")
    assert (first.stdout_offset, first.stderr_offset, stdout) == (0, 0, b"one\ntwo\n")
    assert (reply.exit_code, reply.cause) == (3, "exited")


def test_the_next_connection_gets_what_it_does_not_have(sandbox: Sandbox, client: Client) -> None:
    """Output from an offset on, then what comes, live, with nothing twice; the run's input is reached as well."""
    begin(client, "a", "echo one; echo two >&2; read line; echo $line", stdin=True)
    client.read_until(b"two\n")
    client.sock.close()
    other = sandbox.connect()
    first = other.ask(AttachRun("a", 2, 4))
    assert (first.stdout_offset, first.stderr_offset) == (2, 4)
    assert other.next_frame() == (Kind.STDOUT, b"e\n")
    other.send(Kind.DATA, b"three\n")
    assert other.next_frame() == (Kind.STDOUT, b"three\n")
    other.send(Kind.END)
    assert other.outcome().reply.exit_code == 0


def test_output_beyond_what_is_kept_waits_for_a_reader(sandbox: Sandbox, client: Client) -> None:
    """A run that floods a broken connection stands still when memory is full, and loses not one byte."""
    begin(client, "a", f"read line </tmp/go; head -c {FLOOD_BYTES} /dev/zero")
    client.sock.close()
    other = sandbox.connect()
    let_go(other)
    wait_until(lambda: _is_blocked(sandbox))
    assert not has_ended(other, "a")
    first, stdout, reply = attach(other, "a")
    assert (first.stdout_offset, len(stdout), reply.exit_code) == (0, FLOOD_BYTES, 0)


def _is_blocked(sandbox: Sandbox) -> bool:
    """Whether a `head` waits for room in its pipe."""
    init = sandbox.init_pid()
    for stack in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stack.read_text().rpartition(")")
            pid = int(stack.parent.name)
            if fields[0].endswith("(head") and _descends(pid, init):
                return Path(f"/proc/{pid}/wchan").read_text() in ("pipe_write", "anon_pipe_write", "fifo_pipe_write")
        except OSError:
            continue
    return False


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def test_what_never_began_does_not_begin_later(sandbox: Sandbox, client: Client) -> None:
    """A command that waits for its shell when the connection breaks is cancelled, and known as such."""
    begin(client, "a", "read line </tmp/go")
    queued = sandbox.connect()
    queued.request(Exec("b", "touch /tmp/never", ticket=TICKET))
    wait_until(lambda: "b" in entries(sandbox.connect()))
    queued.sock.close()
    other = sandbox.connect()
    wait_until(lambda: has_ended(other, "b"))
    assert not entries(other)["b"].has_begun
    let_go(other)
    first, _, reply = attach(other, "b")
    assert (first.age_us, reply.cause) == (0, "cancelled")
    assert client.outcome().reply.exit_code == 0
    assert other.reply("test -e /tmp/never").exit_code == 1


def test_an_id_is_run_once_until_it_is_forgotten(client: Client) -> None:
    """Running or ended, its second request is refused."""
    client.request(Exec("a", "exit 1", ticket=TICKET))
    assert client.outcome().reply.exit_code == 1
    client.request(Exec("a", "exit 2", ticket=TICKET))
    assert client.outcome().reply == Error("EXISTS", "there is a run 'a'")
    assert client.ask(ForgetRuns(("a", "unknown"))) == Done()
    assert entries(client) == {}
    client.request(Exec("a", "exit 2", ticket=TICKET))
    assert client.outcome().reply.exit_code == 2


def test_forgetting_a_run_that_goes_on_cancels_it(sandbox: Sandbox, client: Client) -> None:
    """A running run that is forgotten is cancelled, as nobody will ask for its end."""
    begin(client, "a", "sleep 1000")
    client.sock.close()
    other = sandbox.connect()
    assert other.ask(ForgetRuns(("a",))) == Done()
    assert other.stdout("echo free", timeout_ms=10_000) == b"free\n"
    assert isinstance(other.ask(AttachRun("a")), Error)


def test_a_connection_takes_the_place_of_another(sandbox: Sandbox, client: Client) -> None:
    """The first one hears no more of the run, and its end does the run no harm."""
    begin(client, "a", "read line </tmp/go; echo two")
    other = sandbox.connect()
    assert isinstance(other.ask(AttachRun("a")), Attached)
    client.sock.close()
    let_go(sandbox.connect())
    outcome = other.outcome()
    assert (outcome.stdout, outcome.reply.exit_code) == (b"two\n", 0)


def test_a_run_without_a_ticket_ends_with_its_connection(sandbox: Sandbox, client: Client) -> None:
    """A run without a ticket is cancelled when its connection breaks."""
    client.begin("sleep 1000")
    client.sock.close()
    other = sandbox.connect()
    assert other.stdout("echo free", timeout_ms=10_000) == b"free\n"
    assert entries(other) == {}


def test_ends_that_nobody_acknowledges_are_bounded(client: Client) -> None:
    """The oldest are given up, and their output before that."""
    for number in range(3):
        client.request(RunProgram(f"big{number}", ("head", "-c", "600000", "/dev/zero"), ticket=TICKET))
        assert len(client.outcome().stdout) == 600_000
    first, stdout, reply = attach(client, "big0")
    assert (first.stdout_offset, stdout, reply.exit_code) == (600_000, b"", 0)
    assert attach(client, "big2")[0].stdout_offset == 0
    for number in range(MAX_ENDED_RUNS):
        client.request(Exec(f"small{number}", ":", ticket=TICKET))
        assert client.outcome().reply.exit_code == 0
    assert sorted(entries(client)) == sorted(f"small{number}" for number in range(MAX_ENDED_RUNS))


def test_an_impossible_offset_is_refused(client: Client) -> None:
    """An offset behind the output is refused."""
    client.request(Exec("a", "echo x", ticket=TICKET))
    client.outcome()
    for offsets in ((3, 0), (0, 1), (-1, 0)):
        assert client.ask(AttachRun("a", *offsets)) == Error("BAD_REQUEST", "the run has not written that much")
    assert attach(client, "a", 2)[1] == b""
