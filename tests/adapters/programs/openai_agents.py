"""Scenarios for the OpenAI Agents SDK: its runner drives the sandbox for a model with a script."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agents import Agent, Model, ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.sandbox import (
    Dir,
    LocalSnapshotSpec,
    Manifest,
    SandboxAgent,
    SandboxRunConfig,
    User,
)
from agents.sandbox.entries import File
from agents.sandbox.errors import (
    ExecNonZeroError,
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    InvalidManifestPathError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
)
from agents.sandbox.files import EntryKind
from agents.sandbox.snapshot import NoopSnapshotSpec
from openai.types.responses import (
    ResponseApplyPatchToolCall,
    ResponseCustomToolCall,
    ResponseFunctionShellToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
)
from scenarios import box, live, raises, run_all, running, until

from sandkasten import SandboxClient
from sandkasten.adapters.openai_agents import (
    SandkastenSandboxClient,
    SandkastenSandboxClientOptions,
    apply_patch_tool,
    shell_tool,
)
from sandkasten.agents import (
    SandkastenContext,
    create_sandkasten_tools,
    sandbox_tools_for_workspace,
    sandkasten_tools,
)

set_tracing_disabled(True)


class Script(Model):
    """A model that makes the calls of a list, one a turn, then says `done`; `seen` is what it was sent."""

    def __init__(self, *calls: Any) -> None:
        self.calls = list(calls)
        self.seen: list[Any] = []
        self.turn = 0

    async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> ModelResponse:
        self.seen = input
        self.turn += 1
        if self.calls:
            call = self.calls.pop(0)
            output = call(f"call_{self.turn}") if callable(call) else call
        else:
            text = {"type": "output_text", "text": "done", "annotations": []}
            output = ResponseOutputMessage.model_validate(
                {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    async def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    def outputs(self) -> list[str]:
        """Return what the tools answered, in order."""
        return [str(each["output"]) for each in self.seen if isinstance(each, dict) and "output" in each]


def _call(name: str, **arguments: Any) -> Any:
    return lambda number: ResponseFunctionToolCall(
        call_id=number, name=name, arguments=json.dumps(arguments), type="function_call"
    )


def _patch(text: str) -> Any:
    patch = f"*** Begin Patch\n{text}*** End Patch"
    return lambda number: ResponseCustomToolCall(
        call_id=number, name="apply_patch", input=patch, type="custom_tool_call"
    )


async def _run(script: Script, label: str, *, agent: dict[str, Any] | None = None, **sandbox: Any) -> Any:
    options = SandkastenSandboxClientOptions(labels={"test": label}, on_exit=sandbox.pop("on_exit", "end"))
    config = SandboxRunConfig(client=SandkastenSandboxClient(), options=options, **sandbox)
    made = SandboxAgent(name="coder", model=script, **(agent or {}))
    return await Runner.run(made, "go", run_config=RunConfig(sandbox=config))


async def a_run_works_in_a_session_and_ends_it() -> None:
    """The model's commands and patches happen in the sandbox, and no session is left."""
    script = Script(
        _call("exec_command", cmd="id -un; pwd; cat src/a.txt"),
        _patch("*** Update File: src/a.txt\n@@\n-one\n+two\n*** Add File: new/b.txt\n+fresh\n"),
        _call("exec_command", cmd="cat src/a.txt new/b.txt; exit 3"),
        _call("exec_command", cmd="pwd", workdir="src"),
        _patch("*** Update File: missing.txt\n@@\n-one\n+two\n"),
    )
    entries = {"src": Dir(children={"a.txt": File(content=b"one\n")})}
    result = await _run(script, "run", manifest=Manifest(entries=entries))
    assert result.final_output == "done"
    first, patched, second, third, failed = script.outputs()
    assert "code 0" in first and first.endswith("Output:\nsandbox\n/workspace\none\n"), first
    assert "Updated src/a.txt" in patched and "Created new/b.txt" in patched, patched
    assert "code 3" in second and second.endswith("two\nfresh"), second
    assert third.endswith("/workspace/src\n"), third
    assert "missing" in failed, failed
    assert await live("test=run") == []


async def a_kept_session_is_resumed_from_its_state() -> None:
    """A state that went through JSON finds the same session, with its files and processes."""
    client = SandkastenSandboxClient()
    options = SandkastenSandboxClientOptions(labels={"test": "kept"}, on_exit="pause")
    made = await client.create(options=options)
    async with made:
        await made.write(Path("note"), io.BytesIO(b"kept"))
        await made.exec("sleep 600 >/dev/null & echo $! >pid")
    await client.delete(made)
    state = json.dumps(client.serialize_session_state(made.state))
    key = os.environ["SANDKASTEN_API_KEY"]
    assert key not in state
    (kept,) = await live("test=kept")

    script = Script(_call("exec_command", cmd="cat note; kill -0 $(cat pid) && echo alive"))
    resumed = client.deserialize_session_state(json.loads(state))
    await _run(script, "unused", session_state=resumed)
    assert script.outputs()[0].endswith("keptalive\n"), script.outputs()
    assert await live("test=kept") == [kept]
    async with SandboxClient.from_env() as server:
        await (await server.get_session(kept)).destroy()


async def a_port_is_reached_where_the_framework_is_told() -> None:
    """By a preview with its token in the query, the same at each call; a port that was not named is none."""
    options = SandkastenSandboxClientOptions(labels={"test": "ports"}, exposed_ports=(8000,))
    client = SandkastenSandboxClient()
    async with await client.create(options=options) as made:
        endpoint, same = await asyncio.gather(*(made.resolve_exposed_port(8000) for _ in range(2)))
        assert endpoint == same
        link = f"http://8000-{made.state.sandbox_id}.localhost:{endpoint.port}/?_sandkasten_token="
        assert endpoint.url_for("http").startswith(link), endpoint
        async with SandboxClient.from_env() as server:
            (preview,) = await (await server.get_session(made.state.sandbox_id)).previews()
        assert (preview.port, preview.access) == (8000, "token")
        error = await raises(ExposedPortUnavailableError, made.resolve_exposed_port(9))
        assert error.context["reason"] == "not_configured", error
    await client.delete(made)
    assert await live("test=ports") == []


async def a_snapshot_that_can_not_be_had_makes_no_session() -> None:
    """The framework's error comes first."""

    class Missing(NoopSnapshotSpec):
        def build(self, snapshot_id: str) -> Any:
            raise LookupError(snapshot_id)

    options = SandkastenSandboxClientOptions(labels={"test": "missing"})
    await raises(LookupError, SandkastenSandboxClient().create(snapshot=Missing(), options=options))
    assert await live("test=missing") == []


async def a_lost_session_is_made_anew_from_its_snapshot() -> None:
    """Files come back by the snapshot, but for ephemeral ones, which come from the manifest."""
    with tempfile.TemporaryDirectory() as directory:
        client = SandkastenSandboxClient()
        entries = {"cache": Dir(ephemeral=True, children={"c": File(content=b"c", ephemeral=True)})}
        made = await client.create(
            snapshot=LocalSnapshotSpec(base_path=Path(directory)),
            manifest=Manifest(entries=entries),
            options=SandkastenSandboxClientOptions(labels={"test": "lost"}),
        )
        data = os.urandom(300_000)
        async with made:
            await made.write(Path("deep/data.bin"), io.BytesIO(data))
            await made.exec("mkdir empty; ln -s deep/data.bin link; chmod 0700 deep; echo x >cache/other")
        await client.delete(made)
        assert await live("test=lost") == []
        (archive,) = Path(directory).iterdir()
        with tarfile.open(archive) as tar:
            names = tar.getnames()
            assert "deep/data.bin" in names and "empty" in names, names
            assert [each for each in names if each.startswith("cache")] == []

        state = client.deserialize_session_state(client.serialize_session_state(made.state))
        again = await client.resume(state)
        async with again:
            assert again.state.sandbox_id != made.state.sandbox_id or made.state is again.state
            with await again.read(Path("deep/data.bin")) as file:
                assert file.read() == data
            found = await again.exec("stat -c %a deep; readlink link; ls empty cache")
            assert found.stdout == b"700\ndeep/data.bin\ncache:\nc\n\nempty:\n", found.stdout
        await client.delete(again)
        assert await live("test=lost") == []


async def files_have_any_content() -> None:
    """Bytes go in and out as they are; errors are those of the framework; links lead nowhere else."""
    client = SandkastenSandboxClient()
    async with await client.create() as made:
        for data in (b"", bytes(range(256)), os.urandom(6_000_000)):
            await made.write(Path("some/file.bin"), io.BytesIO(data))
            with await made.read(Path("some/file.bin")) as file:
                assert file.read() == data
            assert await made.read_bounded(Path("some/file.bin"), max_bytes=100) == data[:100]
        await made.mkdir("dir")
        await made.exec("ln -s /etc out; echo x >dir/plain; touch 'a b'; mkfifo pipe")
        kinds = {Path(each.path).name: (each.kind, each.size) for each in await made.ls(".")}
        assert kinds["dir"][0] == EntryKind.DIRECTORY
        assert kinds["out"][0] == EntryKind.SYMLINK
        assert kinds["pipe"][0] == EntryKind.OTHER
        assert kinds["a b"] == (EntryKind.FILE, 0)
        (plain,) = await made.ls("dir/plain")
        assert (plain.owner, plain.size, str(plain.permissions)) == ("sandbox", 2, "-rw-r--r--"), plain
        for path, kind in (
            ("missing", WorkspaceReadNotFoundError),
            ("dir", WorkspaceArchiveReadError),
            ("out/passwd", InvalidManifestPathError),
            ("/etc/passwd", InvalidManifestPathError),
            ("../x", InvalidManifestPathError),
        ):
            await raises(kind, made.read(Path(path)))
        await raises(WorkspaceArchiveWriteError, made.write(Path("dir"), io.BytesIO(b"")))
        await raises(InvalidManifestPathError, made.write(Path("out/x"), io.BytesIO(b"")))
        await raises(ExecNonZeroError, made.mkdir("dir"))
        await raises(ExecNonZeroError, made.ls("missing"))
        await made.mv("dir/plain", "moved")
        await made.rm("dir", recursive=True)
        assert "moved" in {Path(each.path).name for each in await made.ls(".")}
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            info = tarfile.TarInfo("inside/n")
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
        await made.hydrate_workspace(io.BytesIO(tar.getvalue()))
        assert (await made.exec("cat inside/n")).stdout == b"abc"
        await raises(WorkspaceArchiveWriteError, made.hydrate_workspace(io.BytesIO(b"no archive")))
    await client.delete(made)


async def output_is_exact() -> None:
    """Both streams are bytes of any content, and more than the server's answer may have."""
    client = SandkastenSandboxClient()
    async with await client.create() as made:
        result = await made.exec("printf '\\377\\0'; printf '\\376' >&2; exit 5")
        assert (result.stdout, result.stderr, result.exit_code) == (b"\xff\0", b"\xfe", 5)
        result = await made.exec("printf", "%s", "$HOME", "x y", shell=False)
        assert result.stdout == b"$HOMEx y"
        result = await made.exec("head -c 12000000 /dev/zero | tr '\\0' x; echo end >&2")
        assert result.stdout == b"x" * 12_000_000
        assert result.stderr == b"end\n"
        result = await made.exec("nosuch", shell=False)
        assert result.exit_code == 127
        assert b"No such file" in result.stderr
        assert (await made.exec("id -un", user="root")).stdout == b"root\n"
        error = await raises(ExecTransportError, made.exec("true", user="ghost"))
        assert "ghost" in str(error)
    await client.delete(made)


async def what_takes_too_long_is_ended() -> None:
    """A time limit, a cancelled call and a cancelled run end the command; the cancelled run ends its session, too."""
    client = SandkastenSandboxClient()
    async with await client.create() as made:
        sandbox_id = made.state.sandbox_id
        error = await raises(ExecTimeoutError, made.exec("echo begun; sleep 600", timeout=0.3))
        assert "begun" in str(error.context), error.context
        await until(lambda: _none(running(sandbox_id)))
        task = asyncio.create_task(made.exec("sleep 601"))
        await until(lambda: running(sandbox_id))
        task.cancel()
        await raises(asyncio.CancelledError, task)
        await until(lambda: _none(running(sandbox_id)))
    await client.delete(made)

    script = Script(_call("exec_command", cmd="sleep 602", yield_time_ms=30_000))
    task = asyncio.create_task(_run(script, "cancelled"))
    await until(lambda: live("test=cancelled"))
    (sandbox_id,) = await live("test=cancelled")
    await until(lambda: running(sandbox_id))
    task.cancel()
    await raises(asyncio.CancelledError, task)
    await until(lambda: _none(live("test=cancelled")))


async def _none(awaitable: Any) -> bool:
    return not await awaitable


async def commands_go_on_between_calls() -> None:
    """A terminal takes input and Ctrl-C; without one there is no input; output is cut as the model asks."""
    script: Script = Script(
        _call("exec_command", cmd="exec python3 -q", tty=True, yield_time_ms=300),
        lambda number: _write(script, number, "print(6 * 7)\n", 1500),
        lambda number: _write(script, number, "import time; time.sleep(600)\n", 300),
        lambda number: _write(script, number, "\x03", 1500),
        lambda number: _write(script, number, "exit(4)\n", 20_000),
        lambda number: _write(script, number, "", 300),
        _call("exec_command", cmd="cat; echo after", yield_time_ms=5000),
        _call("exec_command", cmd="seq 1 100000", yield_time_ms=20_000, max_output_tokens=50),
    )
    await _run(script, "interactive")
    begun, printed, _, interrupted, ended, gone, without, cut = script.outputs()
    assert "running with session ID" in begun, begun
    assert "42" in printed, printed
    assert "KeyboardInterrupt" in interrupted, interrupted
    assert "exited with code 4" in ended, script.outputs()
    assert "not found" in gone, gone
    assert "code 0" in without and without.endswith("after\n"), without
    assert "truncated" in cut and len(cut) < 1000, cut


def _write(script: Script, number: str, chars: str, wait_ms: int) -> Any:
    first = next(each for each in script.outputs() if "session ID" in each)
    session = int(first.partition("session ID ")[2].split()[0])
    return _call("write_stdin", session_id=session, chars=chars, yield_time_ms=wait_ms)(number)


async def accounts_of_a_manifest_are_made() -> None:
    """A run may be as a user whom the manifest names."""
    script = Script(_call("exec_command", cmd="id -un; echo $STAGE"))
    manifest = Manifest(users=[User(name="guest")], environment={"value": {"STAGE": "test"}})
    await _run(script, "accounts", agent={"run_as": "guest"}, manifest=manifest)
    assert script.outputs()[0].endswith("guest\ntest\n"), script.outputs()


async def hosted_tools_work_on_a_session() -> None:
    """OpenAI's shell and patch tools, over a session of the caller's; limits and failures are told to the model."""
    diff = {"type": "update_file", "path": "a.txt", "diff": "@@\n-one\n+two\n"}
    script = Script(
        _shell(["cd /tmp; echo one >/workspace/a.txt", "pwd; echo err >&2; exit 3"]),
        _shell(["sleep 600"], timeout_ms=300),
        _shell(["seq 1 100000; chmod 755 /workspace/a.txt"], max_output_length=100),
        _operation(**diff),
        _operation(**diff),
        _operation(type="create_file", path="new/b.txt", diff="+fresh\n"),
        _operation(type="create_file", path="a.txt", diff="+fresh\n"),
        _operation(type="update_file", path="a.txt", move_to="new/b.txt", diff="@@\n-two\n+three\n"),
        _operation(type="update_file", path="a.txt", move_to="moved/c.txt", diff="@@\n-two\n+three\n"),
        _operation(type="delete_file", path="new/b.txt"),
    )
    async with box() as session:
        agent = Agent(name="coder", model=script, tools=[shell_tool(session), apply_patch_tool(session)])
        await Runner.run(agent, "go", max_turns=20)
        both, late, cut, *patches = script.outputs()
        assert "/tmp" in both and "err" in both and "'exit_code': 3" in both, both
        assert "timeout" in late, late
        assert len(cut) < 1000, cut
        assert [each["status"] for each in script.seen if each.get("type") == "apply_patch_call_output"] == [
            *("completed", "failed", "completed", "failed", "failed", "completed", "completed")
        ], patches
        assert (await session.read("moved/c.txt")).content == b"three\n"
        assert int((await session.files.stat("moved/c.txt")).mode, 8) == 0o755
        assert not await session.files.exists("a.txt")
        assert not await session.files.exists("new/b.txt")


def _shell(commands: list[str], **limits: Any) -> Any:
    return lambda number: ResponseFunctionShellToolCall.model_validate(
        {
            "id": number,
            "call_id": number,
            "type": "shell_call",
            "status": "completed",
            "action": {"commands": commands, **limits},
        }
    )


def _operation(**operation: Any) -> Any:
    return lambda number: ResponseApplyPatchToolCall.model_validate(
        {"id": number, "call_id": number, "type": "apply_patch_call", "status": "completed", "operation": operation}
    )


async def the_published_tools_work() -> None:
    """Tools of `sandkasten.agents`, with a context, with a session, and with a workspace of their own."""
    calls = (
        _call("sandbox_exec", cmd="cd /tmp; echo hi; exit 2"),
        _call("sandbox_write_file", path="x.txt", content="text"),
        _call("sandbox_read_file", path="x.txt"),
        _call("sandbox_list_files"),
        _call("sandbox_stats"),
    )
    async with box() as session:
        for tools, context in (
            (sandkasten_tools(), SandkastenContext(session)),
            (create_sandkasten_tools(session), None),
        ):
            script = Script(*calls)
            await Runner.run(Agent(name="coder", model=script, tools=tools), "go", context=context)
            ran, wrote, read, listed, stats = script.outputs()
            assert ran.startswith("exit_code=2\ncwd=/tmp\n---\nhi"), ran
            assert (wrote, read) == ("wrote x.txt", "text")
            assert listed.endswith(" x.txt") and stats.startswith("memory_bytes="), (listed, stats)
    async with SandboxClient.from_env() as client:
        async with sandbox_tools_for_workspace(client, "agents-test") as (session, tools):
            script = Script(_call("sandbox_exec", cmd="pwd"))
            await Runner.run(Agent(name="coder", model=script, tools=tools), "go")
            assert "/workspace" in script.outputs()[0]
        assert (await session.info()).status == "destroyed"
        await client.delete_workspace("agents-test")


async def a_server_that_is_gone_is_told() -> None:
    """No hang: the framework's own error, which says that it may be tried again."""
    client = SandkastenSandboxClient(base_url="http://127.0.0.1:9", api_key="none", timeout=2.0)
    error = await raises(WorkspaceStartError, client.create())
    assert error.retryable and "no server answers" in str(error), error


if __name__ == "__main__":
    run_all(globals())
