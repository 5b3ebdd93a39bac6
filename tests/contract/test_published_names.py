"""Names and signatures of the published client (`sandkasten` 0.3.0 of PyPI), which are all here."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import sandkasten

MODULES = {
    "sandkasten": {
        *("SandboxClient", "Session", "ExecResult", "ExecChunk", "SessionInfo", "SessionStats", "ReadResult"),
        *("WorkspaceInfo", "SandkastenError", "SandkastenAPIError", "SandkastenStreamError", "__version__"),
        *("SandkastenContext", "sandkasten_tools", "create_sandkasten_tools", "sandbox_tools_for_workspace"),
    },
    "sandkasten.client": {"SandboxClient", "Session", "SessionInfo", "WorkspaceInfo"},
    "sandkasten.session": {
        *("Session", "SandkastenStreamError", "ExecChunk", "ExecResult", "ReadResult", "SessionInfo", "SessionStats"),
    },
    "sandkasten.types": {"ExecResult", "ExecChunk", "SessionInfo", "SessionStats", "ReadResult", "WorkspaceInfo"},
    "sandkasten.exceptions": {"SandkastenError", "SandkastenAPIError", "SandkastenStreamError"},
    "sandkasten.agents": {
        *("SandkastenContext", "sandkasten_tools", "create_sandkasten_tools", "sandbox_tools_for_workspace"),
    },
}

FIELDS: dict[str, dict[str, Any]] = {
    "ExecResult": {"exit_code": ..., "cwd": ..., "output": ..., "truncated": ..., "duration_ms": ...},
    "ExecChunk": {"output": ..., "timestamp": ..., "done": False, "exit_code": 0, "cwd": "", "duration_ms": 0},
    "SessionInfo": dict.fromkeys(("id", "image", "status", "cwd", "created_at", "expires_at"), ...)
    | {"workspace_id": None, "container_id": None, "last_activity": None},
    "SessionStats": {"memory_bytes": ..., "memory_limit": ..., "cpu_usage_usec": ...},
    "ReadResult": {"content": ..., "path": ..., "truncated": ...},
    "WorkspaceInfo": {"id": ...},
}
"""Fields by position, with their defaults; `...` is none."""

_CLIENT, _SESSION = sandkasten.SandboxClient, sandkasten.Session
CALLS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (_CLIENT.__init__, {}, {"base_url": "http://localhost:8080", "api_key": ..., "timeout": 120.0}),
    (_CLIENT.create_session, {}, {"image": "python", "ttl_seconds": None, "workspace_id": None}),
    (_CLIENT.get_session, {"session_id": ...}, {}),
    (_CLIENT.list_sessions, {}, {}),
    (_CLIENT.list_workspaces, {}, {}),
    (_CLIENT.delete_workspace, {"workspace_id": ...}, {}),
    (_CLIENT.close, {}, {}),
    (_SESSION.__init__, {"client": ..., "session_id": ...}, {}),
    (_SESSION.exec, {"cmd": ...}, {"timeout_ms": 30000, "raw_output": False}),
    (_SESSION.exec_stream, {"cmd": ...}, {"timeout_ms": 30000, "raw_output": False}),
    (_SESSION.write, {"path": ..., "content": ...}, {}),
    (_SESSION.read, {"path": ...}, {"max_bytes": None}),
    (_SESSION.upload, {"file": ...}, {"dest_path": "/workspace", "filename": None}),
    (_SESSION.stats, {}, {}),
    (_SESSION.info, {}, {}),
    (_SESSION.destroy, {}, {}),
    (sandkasten.SandkastenAPIError.__init__, {"message": ..., "status_code": None, "response_body": None}, {}),
]
"""Functions with their parameters by position, and by name alone."""


@pytest.mark.parametrize("module", MODULES)
def test_all_names_are_there(module: str) -> None:
    """In the modules where the published client has them."""
    found = import_module(module)
    assert {name for name in MODULES[module] if getattr(found, name, None) is None} == set()


@pytest.mark.parametrize("name", FIELDS)
def test_fields_keep_their_places(name: str) -> None:
    """Newer fields come behind and have defaults."""
    fields = [each for each in dataclasses.fields(getattr(sandkasten, name)) if not each.kw_only]
    first = {each.name: ... if each.default is dataclasses.MISSING else each.default for each in fields}
    assert list(first.items())[: len(FIELDS[name])] == list(FIELDS[name].items())
    later = fields[len(FIELDS[name]) :]
    missing = dataclasses.MISSING
    assert [each.name for each in later if each.default is missing and each.default_factory is missing] == []


@pytest.mark.parametrize(("function", "by_place", "by_name"), CALLS, ids=lambda each: getattr(each, "__qualname__", ""))
def test_calls_are_taken_as_before(function: Any, by_place: dict[str, Any], by_name: dict[str, Any]) -> None:
    """Parameters have their names, places and defaults; newer ones have defaults."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    kinds = inspect.Parameter
    places = [each for each in parameters if each.kind is kinds.POSITIONAL_OR_KEYWORD]
    assert [each.name for each in places] == list(by_place)
    named = {each.name: each.default for each in parameters}
    for name, default in (by_place | by_name).items():
        if default is not ...:
            assert named[name] == default, name
    newer = [each for each in parameters if each.name not in by_place | by_name]
    assert [each.name for each in newer if each.default is kinds.empty] == []


def test_errors_are_of_the_published_classes() -> None:
    """One base for all, and one for what a stream ends with."""
    assert issubclass(sandkasten.SandkastenAPIError, sandkasten.SandkastenError)
    assert issubclass(sandkasten.SandkastenStreamError, sandkasten.SandkastenError)
    error = sandkasten.SandkastenAPIError("no", 404, "{}")
    assert (str(error), error.status_code, error.response_body) == ("no", 404, "{}")


def test_the_published_distribution_beside_ours_is_said(tmp_path: Path) -> None:
    """In one sentence that says what to do: each would overwrite files of the other."""
    (tmp_path / "sandkasten").mkdir()
    source = Path(sandkasten.__file__)
    (tmp_path / "sandkasten/__init__.py").write_bytes(source.read_bytes())
    command = [sys.executable, "-c", "import sandkasten"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "sandkasten-0.3.0.dist-info").mkdir()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError")]
    assert "run `pip uninstall sandkasten`" in sentence
