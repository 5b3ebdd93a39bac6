"""Errors that a client gets when the runner refuses a command."""

from __future__ import annotations

import pytest

from runner.wire.protocol import Error, ErrorCode
from sandkasten.actors.runs.driver import refusal
from sandkasten.model.errors import InvalidRequest, SandboxError, ShellFailed


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
