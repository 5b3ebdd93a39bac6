"""The steps of one short command: reads and writes of its shell and of PID 1, which the kernel counts.

`:` costs no more than the way of a command to the shell and back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.wire.protocol import ExecReply
from tests.kernel.runner_harness import Sandbox, needs_namespaces
from tests.leaks import children

pytestmark = needs_namespaces

COMMANDS = 50


def _reads_and_writes(pid: int) -> tuple[int, int]:
    """Return how many calls of read(2) and write(2) a process has made (proc_pid_io(5))."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["syscr"]), int(fields["syscw"])


@pytest.mark.parametrize(
    ("shell", "most_reads", "least_variables"), [("bash", 2, 1), ("/bin/dash", 15, 0)], ids=["bash", "dash"]
)
def test_a_short_command_takes_few_reads_and_writes(
    sandbox: Sandbox, shell: str, most_reads: int, least_variables: int
) -> None:
    """bash reads its order at once, and so the text of the command; dash reads the order byte by byte, and the file
    to its end. Each writes two reports and the state, bash a line of it for each variable."""
    client = sandbox.shell(shell)
    variables = len(client.stdout("export -p").splitlines())
    (pid,) = children(sandbox.init_pid())
    before = _reads_and_writes(pid)
    for _ in range(COMMANDS):
        assert isinstance(client.reply(":"), ExecReply)
    reads, writes = (now - then for now, then in zip(_reads_and_writes(pid), before, strict=True))
    assert reads <= COMMANDS * most_reads + most_reads
    assert writes <= (COMMANDS + 1) * (2 + least_variables * variables + 4)


def test_a_short_command_takes_pid_1_few_reads_and_writes(sandbox: Sandbox) -> None:
    """PID 1 reads the ends of two FIFOs, the last pid and a counter, and writes one file. In the best of several tries,
    for on a busy machine a command is no short one."""
    client = sandbox.shell("bash")
    client.run(":")
    init = sandbox.init_pid()

    def steps() -> tuple[int, int]:
        before = _reads_and_writes(init)
        for _ in range(COMMANDS):
            client.run(":")
        reads, writes = (now - then for now, then in zip(_reads_and_writes(init), before, strict=True))
        return reads, writes

    assert min(steps() for _ in range(10)) <= (4 * COMMANDS + 4, COMMANDS)


def test_a_job_that_keeps_the_output_open_costs_no_answer(sandbox: Sandbox) -> None:
    """The end of such a command is told by its report alone; so is that of one that has sent its output elsewhere."""
    client = sandbox.shell("bash")
    for command, output in (("sleep 1000 & echo a", b"a\n"), ("exec >/dev/null; sleep 0.01", b""), ("exec 1>&2", b"")):
        outcome = client.run(command, timeout_ms=10_000)
        assert (outcome.reply.exit_code, outcome.reply.cause, outcome.stdout) == (0, "exited", output)
    assert client.stdout("kill %1; echo next") == b"next\n"
