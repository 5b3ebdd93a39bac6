"""Anthropic's tools, the tool runner, a loop without a framework, and what the Claude Agent SDK is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from sandkasten.adapters.anthropic import claude_agent_options
from tests.adapters.conftest import EXAMPLES, PROGRAMS, PYTHON, Ran, results, scenarios
from tests.adapters.scripted import Turn, scripted
from tests.e2e.daemon import KEY, Daemon

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("command_seed")]
PROGRAM = "anthropic_tools.py"
EDITOR = "str_replace_based_edit_tool"


@pytest.fixture(scope="module")
def ran(run: Callable[..., Ran]) -> dict[str, Any]:
    turns: list[Turn] = [
        (EDITOR, {"command": "create", "path": "a.txt", "file_text": "one\n"}),
        (EDITOR, {"command": "str_replace", "path": "a.txt", "old_str": "one", "new_str": "two"}),
        (EDITOR, {"command": "view", "path": "missing.txt"}),
        ("bash", {"command": "cat a.txt; exit 3"}),
        "done",
        ("write", {"file_path": "a.txt", "content": "one\n"}),
        ("edit", {"file_path": "a.txt", "old_string": "one", "new_string": "two"}),
        ("read", {"file_path": "missing.txt"}),
        ("grep", {"pattern": "t.o"}),
        ("bash", {"command": "cd /tmp; pwd; exit 3"}),
        "done",
        ("write", {"file_path": "b.txt", "content": "worker\n"}),
        ("read", {"file_path": "missing.txt"}),
        ("bash", {"command": "cat b.txt"}),
        "done",
    ]
    with scripted(*turns) as model:
        found = results(run(PROGRAMS / PROGRAM, **model.environment))
        names = [(each["type"], each["name"]) for each in model.requests[0]["tools"]]
        assert names == [("bash_20250124", "bash"), ("text_editor_20250728", EDITOR)]
        failed = [number for number, each in enumerate(model.results()) if each.get("is_error")]
        assert failed == [2, 6, 10], model.texts()
        texts = model.texts()
        assert texts[3] == "two\n[exit code 3]"
        assert texts[7].startswith("/workspace/a.txt:1:two\n"), texts
        assert texts[8].startswith("/tmp\n[exit 3, "), texts
        assert texts[11].startswith("worker\n[exit 0, "), texts
        assert (model.orders[0], model.orders[-1]) == ("ack", "stop"), model.orders
        assert "heartbeat" in model.orders
    return found


@pytest.mark.parametrize("name", scenarios(PROGRAM))
def test_scenario(ran: dict[str, Any], name: str) -> None:
    """The docstring of the scenario is the claim."""
    assert ran[name]["trouble"] is None, ran[name]["trouble"]


def test_the_example_of_the_tool_runner(run: Callable[..., Ran]) -> None:
    """docs/examples/anthropic_tools.py, as it is: only the model's address is another."""
    with scripted(("bash", {"command": "python3 -c 'print(6 * 7)'"}), "It printed 42.") as model:
        assert "It printed 42." in run(EXAMPLES / "anthropic_tools.py", **model.environment).stdout
        assert model.texts() == ["42\n"]


def test_the_loop_without_a_framework(run: Callable[..., Ran]) -> None:
    """docs/examples/plain_loop.py, as it is, has at most 40 lines."""
    path = EXAMPLES / "plain_loop.py"
    assert len(path.read_text().splitlines()) <= 40
    turns: list[Turn] = [("bash", {"command": "cd /tmp; false"}), ("bash", {"command": "pwd"}), "It is /tmp."]
    with scripted(*turns) as model:
        assert run(path, "Where are you?", **model.environment).stdout == "It is /tmp.\n"
        assert model.texts() == ["\n[exited, exit code 1]", "/tmp\n\n[exited, exit code 0]"]
        assert model.requests[0]["messages"] == [{"role": "user", "content": "Where are you?"}]


@pytest.mark.skipif(
    not [*PYTHON.parents[1].glob("lib/*/site-packages/claude_agent_sdk")],
    reason="needs claude-agent-sdk, of 385 MB: .venv-agents/bin/pip install claude-agent-sdk",
)
def test_the_example_for_the_claude_agent_sdk(run: Callable[..., Ran], tmp_path: Path) -> None:
    """docs/examples/claude_agent.py likewise, with an empty home: the model has the tools of the sandbox alone."""
    quiet = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    with scripted(("mcp__sandkasten__bash", {"command": "cd /tmp; expr 6 \\* 7; false"}), "It is 42.") as model:
        done = run(EXAMPLES / "claude_agent.py", "What is 6 times 7?", **quiet, **model.environment)
        assert done.stdout.splitlines()[-1] == "It is 42."
        (result,) = map(json.loads, model.texts())
        assert (result["output"], result["exit_code"], result["cwd"]) == ("42\n", 1, "/tmp")
        tools = {each["name"] for each in model.requests[0]["tools"]} - {"DeferredToolPlaceholder"}
        assert {name for name in tools if not name.startswith("mcp__sandkasten__")} == set()


def test_what_the_claude_agent_sdk_is_given_works(daemon: Daemon) -> None:
    """The official client of the protocol finds the sandbox's tools with that address and that header."""
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    server = claude_agent_options(daemon.wait_url(), KEY, sandbox="from-agent")["mcp_servers"]["sandkasten"]

    async def use() -> None:
        async with (
            httpx2.AsyncClient(headers=server["headers"]) as http,
            streamable_http_client(server["url"], http_client=http) as (read, write, *_),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            assert {"bash", "read", "write", "edit"} <= {each.name for each in (await session.list_tools()).tools}

    anyio.run(use)
