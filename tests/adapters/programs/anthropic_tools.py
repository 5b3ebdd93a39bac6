"""Scenarios for Anthropic's tools: handlers, and the package's tool runner against a server with a script."""

from __future__ import annotations

import asyncio
import os
import tempfile

from anthropic import AsyncAnthropic, PermissionDeniedError
from anthropic.lib.environments import EnvironmentWorker
from anthropic.lib.tools import ToolError
from anthropic.lib.tools.agent_toolset import AgentToolContext, beta_agent_toolset_20260401
from scenarios import box, raises, run_all, running, until

from sandkasten.adapters.anthropic import (
    MAX_CHARS,
    Bash,
    TextEditor,
    ToolFailed,
    agent_toolset,
    claude_agent_options,
    sandbox_tools,
)


async def the_shell_is_kept_until_it_is_restarted() -> None:
    """Directory, variables and functions stay; time limits and failures are told; the model gets no more than it can
    take."""
    async with box() as session:
        bash = Bash(session, timeout_ms=1000)
        assert await bash({"command": "cd /tmp; X=1; f() { echo f; }"}) == ""
        assert await bash({"command": "pwd; echo $X; f"}) == "/tmp\n1\nf\n"
        assert await bash({"command": "echo out; echo err >&2; (exit 3)"}) == "out\nerr\n[exit code 3]"
        late = await bash({"command": "echo begun; sleep 600"})
        assert late.startswith("begun\n[timed out after 1 s"), late
        assert await bash({"command": "pwd"}) == "/tmp\n"
        assert await bash({"command": "printf 'a\\377b'"}) == "a\ufffdb"
        big = await bash({"command": "seq 1 200000"})
        assert len(big) < MAX_CHARS + 200, len(big)
        assert "characters left out" in big and big.endswith("200000\n"), big[-100:]
        assert "restarted" in await bash({"restart": True})
        assert await bash({"command": "pwd; echo -$X-; f"}) != "/tmp\n-1-\nf\n"
        assert (await session.exec("pwd")).output == "/workspace\n"
        other = Bash(session, shell="other")
        assert await asyncio.gather(*(other({"command": f"echo {n}"}) for n in range(3))) == ["0\n", "1\n", "2\n"]
        for given in ({}, {"command": ""}, {"command": 7}):
            await raises(ToolFailed, bash(given))


async def files_are_viewed_and_edited() -> None:
    """The four commands, and for each refusal a reason that says what would work."""
    async with box() as session:
        edit = TextEditor(session)
        path = "/workspace/src/a.py"
        assert "wrote" in await edit({"command": "create", "path": path, "file_text": "one\ntwo\ntwo\nthree\n"})
        view = await edit({"command": "view", "path": path, "view_range": [2, -1]})
        assert "     2\ttwo" in view and "one" not in view.partition("[")[0], view
        assert "src" in await edit({"command": "view", "path": "/workspace"})
        assert "+ONE" in await edit({"command": "str_replace", "path": path, "old_str": "one", "new_str": "ONE"})
        many = await raises(ToolFailed, edit({"command": "str_replace", "path": path, "old_str": "two"}))
        assert "lines 2, 3" in str(many), many
        await raises(ToolFailed, edit({"command": "str_replace", "path": path, "old_str": "absent", "new_str": ""}))
        await edit({"command": "insert", "path": path, "insert_line": 0, "insert_text": "zero"})
        await edit({"command": "str_replace", "path": path, "old_str": "three\n"})
        assert (await session.read(path)).content == b"zero\nONE\ntwo\ntwo\n"
        for given in (
            {"command": "view", "path": "/workspace/none"},
            {"command": "view"},
            {"command": "undo_edit", "path": path},
            {"command": "insert", "path": path, "insert_line": 99, "insert_text": "x"},
            {"command": "create", "path": "/etc/x", "file_text": ""},
            {"command": "view", "path": path, "view_range": 7},
            {"command": "view", "path": path, "view_range": ["1", {}]},
            {"command": "view", "path": ["x"]},
            {"command": ["view"], "path": path},
            {"command": "str_replace", "path": path, "old_str": 1, "new_str": []},
            {"command": "insert", "path": path, "insert_line": None, "insert_text": "x"},
            {"command": "create", "path": "none.txt", "file_text": None},
            {},
        ):
            await raises(ToolFailed, edit(given))
        await session.files.write("big", "x" * 99 + "\n" + "y\n" * 100_000)
        assert len(await TextEditor(session, max_characters=500)({"command": "view", "path": "big"})) < 700


async def the_tool_runner_works_in_a_session() -> None:
    """Requests name the tools as the API wants them, and failures are results with `is_error`."""
    async with box() as session, AsyncAnthropic() as claude:
        runner = claude.beta.messages.tool_runner(
            model="claude-sonnet-5-5",
            max_tokens=1000,
            tools=sandbox_tools(session),
            messages=[{"role": "user", "content": "go"}],
        )
        said = [message async for message in runner]
        assert said[-1].content[0].text == "done", said[-1]
        assert (await session.read("a.txt")).content == b"two\n"


async def the_agent_toolset_works_in_a_session() -> None:
    """Names and parameters are those of the package, whose runner calls the tools."""
    with tempfile.TemporaryDirectory() as directory:
        own = {each.name: each.to_dict() for each in beta_agent_toolset_20260401(AgentToolContext(workdir=directory))}
    async with box() as session, AsyncAnthropic() as claude:
        tools = agent_toolset(session)
        assert [each.name for each in tools] == list(own)
        for each in tools:
            made, expected = each.to_dict()["input_schema"], own[each.name]["input_schema"]
            assert expected["properties"].keys() <= made["properties"].keys(), each.name
            assert {*made["required"]} <= {*expected.get("required", ())}, each.name
        runner = claude.beta.messages.tool_runner(
            model="claude-sonnet-5-5", max_tokens=1000, tools=tools, messages=[{"role": "user", "content": "go"}]
        )
        said = [message async for message in runner]
        assert said[-1].content[0].text == "done", said[-1]
        assert (await session.read("a.txt")).content == b"two\n"
        await session.files.write("dot.png", b"\x89PNG")
        text, image = await tools[1].call({"file_path": "dot.png"})
        assert (text["type"], image["source"]["media_type"]) == ("text", "image/png")
        for number, given in (
            (0, {"command": 7}),
            (0, {"command": "true", "timeout_ms": "soon"}),
            (1, {"file_path": "a.txt", "view_range": 7}),
            (2, {"file_path": "a.txt", "content": {}}),
            (3, {"file_path": "a.txt", "old_string": None, "new_string": "x"}),
            (4, {"pattern": [1]}),
        ):
            await raises(ToolError, tools[number].call(given))
        await session.destroy()
        await raises(ToolError, tools[0].call({"command": "true"}))


async def an_environment_worker_works_in_a_session() -> None:
    """The package's worker claims a piece of work, runs the tools that its session asks for, and ends it."""
    async with box() as session, AsyncAnthropic() as claude:
        with tempfile.TemporaryDirectory() as directory:
            worker = EnvironmentWorker(
                claude,
                environment_id="env",
                environment_key="key",
                tools=agent_toolset(session),
                workdir=directory,
            )
            await raises(PermissionDeniedError, worker.run())  # there is no more work
            assert not os.listdir(directory)
        assert (await session.read("b.txt")).content == b"worker\n"


async def a_cancelled_call_ends_its_command() -> None:
    """Nothing runs on in the sandbox, and the shell takes the next command."""
    async with box() as session:
        bash = Bash(session)
        task = asyncio.create_task(bash({"command": "sleep 600"}))
        await until(lambda: running(session.id))
        task.cancel()
        await raises(asyncio.CancelledError, task)
        assert await running(session.id) == []
        assert await bash({"command": "echo next"}) == "next\n"


async def the_claude_agent_sdk_gets_its_arguments() -> None:
    """The server's `/mcp`, its key in a header, and no tool of the SDK's own."""
    options = claude_agent_options("http://host:8080/", "secret", sandbox="a b")
    assert options["mcp_servers"]["sandkasten"] == {
        "type": "http",
        "url": "http://host:8080/mcp?sandbox=a%20b",
        "headers": {"Authorization": "Bearer secret"},
    }
    assert options["tools"] == []


if __name__ == "__main__":
    run_all(globals())
