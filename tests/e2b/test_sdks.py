"""E2B's SDKs as published, unchanged, against the real daemon: what they do, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2b.conftest import Scenarios

_RESULTS = {
    "run": ["hi 1\n", "e\n", 0],
    "exits": [[3, "exit status 3"], [137, "exit status 137"], [-1, "signal: killed"], [127, "exit status 127"]],
    "users": ["user\n/home/user\n", "root\n/root\n"],
    "closed input": "/dev/null\n",
    "large output": 3_000_000,
    "time limit": "ended",
    "background": [[["/bin/bash", ["-l", "-c", "cat; echo over"], True]], "line\nover\n", "line\nover\n"],
    "kill": [True, False, -1, "signal: killed"],
    "terminal": [True, 5],
    "write": ["/home/user/a/b.txt", "b.txt", ["/home/user/c/1", "/tmp/ü x"]],
    "read": ["é\n", [0, 255]],
    "large file": [True, True, True],
    "tree": [[True, False], "/home/user/new/sub/2", False, True],
    "link": ["symlink", "a/b.txt"],
    "entry": ["file", 3, 0o640, "-rw-r-----", "user"],
    "removed": [True, None, False],
    "owner": "root",
    "watch": ["chmod b", "create a", "create b", "create sub", "remove b", "rename a"],
    "signed": "signed",
    "signed upload": [200, "sent"],
    "git": [False, True, "main"],
    "badly signed": [401, 401, 401],
    "ports": [502, 200, 200, 401, 200],
    "info": ["base", {"a b": "c&d é"}, "running", 1, 512],
    "list": [1, 0],
    "metrics": [512 * 2**20, []],
    "timeout": True,
    "connect shortens nothing": True,
    "pause at the end": ["awake\n", "running", "pause"],
    "pages": True,
    "alone": [False, True],
    "another network": [False, True],
}
"""Results of the scenarios that are the same in every language."""

_ERRORS = {
    "refused commands": ["InvalidArgument"] * 3,
    "refused files": [*["FileNotFound"] * 2, *["InvalidArgument"] * 2, *["FileNotFound"] * 2, "Sandbox"],
    "watch nothing": "FileNotFound",
    "refused": ["Authentication", "Sandbox", "SandboxNotFound", "Sandbox", "Sandbox"],
}
"""Errors by the beginning of their names, which end differently in the two languages."""

_GONE = "SandboxNotRunningException"
_OF_PYTHON = {
    "stream of input": "30000\n",
    "pause": [True, False, False, "paused", _GONE, True, "kept"],
    "killed": [True, _GONE, False, False, _GONE],
}
_OF_JAVASCRIPT = {
    "pause": [True, False, False, "paused", "SandboxNotFoundError", True, "kept"],
    "killed": [True, "TimeoutError", False, False, "SandboxNotFoundError"],
}
"""A command under which its sandbox is killed has timed out, for this SDK; its text says why."""


@pytest.mark.parametrize("language", ["python", "python, async", "javascript"])
def test_a_program_for_e2b_runs_unchanged(language: str, run: Callable[[str], Scenarios]) -> None:
    """Sandboxes, commands, terminals, files, changes, signed URLs and pauses are what each SDK expects, and so is what
    happens to a client whose sandbox is gone."""
    is_python = language != "javascript"
    ending = "Exception" if is_python else "Error"
    errors = {
        name: [f"{each}{ending}" for each in names] if isinstance(names, list) else f"{names}{ending}"
        for name, names in _ERRORS.items()
    }
    assert run(language) == {**_RESULTS, **errors, **(_OF_PYTHON if is_python else _OF_JAVASCRIPT)}
