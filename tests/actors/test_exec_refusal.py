"""Errors that a client gets when the runner refuses a command, or is too old for it."""

from __future__ import annotations

import pytest

from runner.wire.protocol import MERGED_VERSION, Error, ErrorCode, Exec
from sandkasten.actors.runs.driver import refusal, request_of
from sandkasten.actors.runs.run import Run, RunRequest, Shell
from sandkasten.errors import InvalidRequest, SandboxError, ShellFailed
from sandkasten.model import ExecSpec, StreamsMode


def test_a_directory_that_can_not_be_entered_is_named() -> None:
    """The client sees which of its fields was wrong."""
    error = refusal(Error("FILE_NOT_FOUND", "no directory to run in: nope"))
    assert type(error) is InvalidRequest
    assert list(error.details) == ["cwd"]


@pytest.mark.parametrize("code", ["NO_SHELL", "SHELL_FAILED"])
def test_a_shell_that_can_not_be_had_is_told(code: ErrorCode) -> None:
    """The error blames neither the request nor the daemon: the session's settings or programs left its shell unable to
    run.
    """
    error = refusal(Error(code, "words"))
    assert (type(error), error.message) == (ShellFailed, "words")


def test_what_the_client_can_not_mend_is_the_sandbox_s() -> None:
    """An I/O error in the sandbox is not blamed on the request."""
    assert type(refusal(Error("IO_ERROR", "words"))) is SandboxError


async def test_an_older_pid_1_is_asked_only_for_what_it_knows() -> None:
    """A run that waits without bound is nothing to refuse; one whose streams would not be merged is."""
    old, shell = MERGED_VERSION - 1, Shell("default")
    for spec in (ExecSpec("first"), ExecSpec("second", streams=StreamsMode.MERGED)):
        Run(RunRequest(spec, timeout_ms=None, queue_timeout_ms=7)).enter(shell)
    first, merged = shell.runs
    assert request_of(first, cgroup=None, ticket="", version=old) == request_of(first, cgroup=None, ticket="")
    bounded = request_of(merged, cgroup=None, ticket="")
    assert isinstance(bounded, Exec)
    assert (bounded.merged, bounded.queue_timeout_ms) == (True, 7)
    by_default = Run(RunRequest(ExecSpec("third", reads_both=True), timeout_ms=None))
    asked = [request_of(by_default, cgroup=None, ticket="", version=version) for version in (old, MERGED_VERSION)]
    assert [each.merged for each in asked] == [False, True]
    with pytest.raises(InvalidRequest):
        request_of(merged, cgroup=None, ticket="", version=old)
