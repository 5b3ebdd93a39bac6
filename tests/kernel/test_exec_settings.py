"""Settings of runs in the configuration: each holds inside the sandbox, where the runs are."""

from __future__ import annotations

import attrs
import pytest

from sandkasten.app import open_supervisor
from sandkasten.config import Config, Defaults, RunsSettings
from sandkasten.model import Cause, ExecSpec, SessionSpec

LONG_MS = 20_000
TIDY = "trap 'sleep 0.7; echo tidy; exit' {}; echo ready; while :; do sleep 0.01; done"
AT_ONCE = RunsSettings(interrupt_grace_ms=0, terminate_grace_ms=0, kill_grace_ms=0)


@pytest.mark.parametrize(
    ("runs", "script"),
    [
        (attrs.evolve(AT_ONCE, interrupt_grace_ms=LONG_MS), TIDY.format("INT")),
        (attrs.evolve(AT_ONCE, terminate_grace_ms=LONG_MS), "trap '' INT; " + TIDY.format("TERM")),
    ],
    ids=["interrupt", "terminate"],
)
async def test_what_is_asked_to_end_has_the_configured_time(config: Config, runs: RunsSettings, script: str) -> None:
    """A program that is asked to end has the configured grace; with the usual one it would be killed before it has
    tidied up.
    """
    async with open_supervisor(attrs.evolve(config, runs=runs)) as supervisor:
        session = await supervisor.create(SessionSpec())
        for timeout_ms in (100, 1000, 10_000):
            result = await supervisor.exec(session.id, ExecSpec(argv=("sh", "-c", script), timeout_ms=timeout_ms))
            assert result.end.cause == Cause.TIMED_OUT
            if result.stdout:  # the shell has set its trap in time
                break
        assert result.stdout == b"ready\ntidy\n"


async def test_a_stuck_shell_has_the_configured_time(config: Config) -> None:
    """A shell that executes nothing any more can't report its command's end: it is replaced, not before that time."""
    async with open_supervisor(attrs.evolve(config, runs=attrs.evolve(AT_ONCE, kill_grace_ms=1500))) as supervisor:
        session = await supervisor.create(SessionSpec())
        end = (await supervisor.exec(session.id, ExecSpec("set -n", timeout_ms=100))).end
        assert (end.cause, end.shell_restarted) == (Cause.TIMED_OUT, True)
        assert end.duration_ms >= 1500


async def test_a_time_limit_above_the_maximum_is_the_maximum(config: Config) -> None:
    """A time limit above the maximum is lowered to it, and the result says which limit held."""
    short = attrs.evolve(config, defaults=Defaults(max_exec_timeout_ms=1000))
    async with open_supervisor(short) as supervisor:
        session = await supervisor.create(SessionSpec())
        end = (await supervisor.exec(session.id, ExecSpec(":", timeout_ms=10**9))).end
        assert (end.cause, end.timeout_ms) == (Cause.EXITED, 1000)
        end = (await supervisor.exec(session.id, ExecSpec("sleep 1000", timeout_ms=10**9))).end
        assert (end.cause, end.timeout_ms) == (Cause.TIMED_OUT, 1000)
