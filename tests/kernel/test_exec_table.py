"""Every hostile or unlucky command of the table, under bash, dash and BusyBox: its streams, its end, its shell later.

One sandbox for each shell; each row has a shell of its own in it, so that what one does to its shell is no other's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from runner.wire.protocol import CloseShell, Done, ExecReply, OpenShell, ShellInfo
from tests.kernel.exec_rows import ROWS, WORKSPACE, Row
from tests.kernel.runner_harness import SHELLS, Client, Outcome, Sandbox, needs_namespaces, open_sandbox, wait_until
from tests.leaks import descendants

pytestmark = needs_namespaces

STATE = "kept() { return 7; }; export KEPT=7"
"""State of a shell before its row."""


@dataclass
class Session:
    """A sandbox with one kind of shell."""

    sandbox: Sandbox
    client: Client
    path: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def open_shell(self) -> str:
        """Return the name of a new shell in a new directory of that name."""
        name = f"row{next(self.numbers)}"
        assert self.client.run(f"mkdir {name}").reply.exit_code == 0
        info = self.client.ask(OpenShell(name, shell=self.path, cwd=name))
        assert isinstance(info, ShellInfo), info
        return name

    def programs(self, *names: str) -> list[str]:
        """Return which processes of these names there are."""
        return sorted(name for _, name in descendants(self.sandbox.pid) if name in names)


@pytest.fixture(scope="module", params=SHELLS)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    with open_sandbox() as sandbox:
        session = Session(sandbox, sandbox.shell(request.param), request.param)
        assert session.client.run("true").reply.exit_code == 0  # the session's own shell is there before the first row
        yield session
        assert sandbox.is_alive()


@pytest.fixture
def shell(session: Session) -> Iterator[str]:
    """A shell with some state, gone afterwards with all it left running."""
    name = session.open_shell()
    assert session.client.run(STATE, shell=name).reply.exit_code == 0
    yield name
    assert session.client.ask(CloseShell(name)) == Done()
    wait_until(lambda: not session.programs("sleep", "cat"))


def check(row: Row, outcome: Outcome, *, restarted: bool) -> None:
    """Compare all that a row says, and whether the shell was replaced."""
    reply = outcome.reply
    assert isinstance(reply, ExecReply), reply
    if row.stdout is not None:
        assert outcome.stdout == row.stdout
    if row.stderr is not None:
        assert outcome.stderr == row.stderr
    if row.exit_code >= 0:
        assert reply.exit_code == row.exit_code
    assert (reply.signal, reply.cause, reply.shell_restarted) == (row.signal, row.cause, restarted)
    if row.cause == "timed_out":
        assert reply.duration_us >= row.timeout_ms * 1000


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_command_ends_as_the_table_says_and_its_shell_goes_on(session: Session, shell: str, row: Row) -> None:
    """A shell that survived has its functions, one that was replaced its exports; both are where they were."""
    if row.file:
        with contextlib.closing(session.sandbox.connect()) as client:
            client.write_file(f"{WORKSPACE}/{shell}/bytes", row.file)
    outcome = session.client.run(row.command, shell=shell, stdin=row.stdin, timeout_ms=row.timeout_ms)
    restarted = os.path.basename(session.path) in row.ends
    check(row, outcome, restarted=restarted)
    if not row.leaves:
        assert session.programs("sleep", "cat") == []
    if row.cause == "timed_out":
        assert len(session.programs("sh", "bash", "dash", "busybox")) == 2  # the session's own shell and this one
    probe = session.client.reply("return $KEPT" if restarted else "kept", shell=shell, timeout_ms=20_000)
    assert (probe.exit_code, probe.signal, probe.cause, probe.shell_restarted) == (7, None, "exited", False)
    directory = b"/".join([WORKSPACE.encode(), shell.encode(), *([row.cwd] if row.cwd else [])])
    assert probe.cwd.encode("utf-8", "surrogateescape") == directory
