"""MCP by the official client: over HTTP and over standard input and output, in both eras of the protocol."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import attrs
import httpx
import httpx2
import mcp_types as types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.shared.exceptions import MCPError

from sandkasten.adapters.anthropic import _CallIn
from sandkasten.api.http import mcp as front
from sandkasten.api.http.mcp import McpCall
from sandkasten.errors import NotInstalled
from sandkasten.mcp import server
from sandkasten.mcp.sandboxes import Sandboxes
from sandkasten.mcp.tools import TOOLS, chosen, perform
from sandkasten.sdk import SandboxClient, Session
from tests.e2e.daemon import KEY, SCRIPT, Daemon, running_daemon
from tests.e2e.test_keys import key
from tests.sdk.test_bad_servers import DONE, answering, refusal
from tests.waiting import patience

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("command_seed")]

NEWEST = "2026-07-28"
"""The first protocol without a handshake: `auto` speaks it, `legacy` one that is older."""
ERAS = ("legacy", "auto")
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that serves previews."""
    with running_daemon(tmp_path_factory.mktemp("data"), SANDKASTEN_PREVIEW_LISTEN="127.0.0.1:0") as daemon:
        daemon.wait_url()
        yield daemon


def on_asyncio(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on asyncio: the official client leaves generators unfinished, of which trio warns."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:  # of the test
        anyio.run(functools.partial(test, *arguments, **named))

    return run


@dataclass
class Talk:
    """A connection of the official client, with what tests ask most."""

    client: Client

    async def call(self, tool: str, **arguments: Any) -> str:  # JSON values
        """Return the text of a call that must not be an error."""
        return await self._text(tool, arguments, is_error=False)

    async def fail(self, tool: str, **arguments: Any) -> str:  # JSON values
        """Return the text of a call that must be an error."""
        return await self._text(tool, arguments, is_error=True)

    async def _text(self, tool: str, arguments: dict[str, Any], *, is_error: bool) -> str:
        result = await self.client.call_tool(tool, arguments)
        content = result.content[0]
        assert isinstance(content, types.TextContent)
        assert result.is_error == is_error, content.text
        return content.text

    async def facts(self, tool: str, **arguments: Any) -> Mapping[str, Any]:  # JSON values
        """Return the structured content of a call."""
        return dict((await self.client.call_tool(tool, arguments)).structured_content)


@contextlib.asynccontextmanager
async def over_http(daemon: Daemon, era: str = "auto", *, token: str = KEY, query: str = "") -> AsyncIterator[Talk]:
    """Connect to `/mcp` of the daemon."""
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=patience(30)) as http:
        transport = streamable_http_client(f"{daemon.wait_url()}/mcp{query}", http_client=http)
        async with Client(transport, mode=era) as client:
            assert (client.protocol_version >= NEWEST) == (era == "auto")
            yield Talk(client)


@contextlib.asynccontextmanager
async def over_stdio(daemon: Daemon, era: str = "auto", *, token: str = KEY) -> AsyncIterator[Talk]:
    """Start the server as a child that speaks on its standard input and output."""
    variables = {"SANDKASTEN_URL": daemon.wait_url(), "SANDKASTEN_API_KEY": token}
    server = StdioServerParameters(command=str(SCRIPT), args=["mcp"], env=variables)
    async with Client(server, mode=era) as client:
        assert (client.protocol_version >= NEWEST) == (era == "auto")
        yield Talk(client)


@pytest.fixture(autouse=True)
def no_session_stays(daemon: Daemon) -> Iterator[None]:
    yield
    with daemon.client() as client:
        for session in client.get("/v1/sessions").json():
            client.delete(f"/v1/sessions/{session['id']}")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_it_while_standard_input_is_open(daemon: Daemon, number: signal.Signals, status: int) -> None:
    """The first signal, whatever the program does that started it."""
    variables = {**os.environ, "SANDKASTEN_URL": daemon.wait_url(), "SANDKASTEN_API_KEY": KEY}
    with subprocess.Popen(
        [SCRIPT, "mcp"], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == 1
            process.send_signal(number)
            assert process.wait(patience(3)) == status
        finally:
            process.kill()


@pytest.mark.parametrize("connect", [over_http, over_stdio])
@pytest.mark.parametrize("era", ERAS)
@on_asyncio
async def test_a_model_works_in_its_sandbox(daemon: Daemon, connect: Any, era: str) -> None:
    """One story over each transport in each era: shell, files, search, background, image, resources."""
    async with connect(daemon, era) as talk:
        text = await talk.call("bash", command="cd /tmp; export WHO=me; echo hi; false")
        assert text.endswith("hi\n[exit 1, 0.0 s, cwd /tmp]")
        facts = await talk.facts("bash", command="echo $WHO")
        assert (facts["output"], facts["exit_code"], facts["cwd"], facts["cause"]) == ("me\n", 0, "/tmp", "exited")
        assert "timed out after 0.3 s, shell kept" in await talk.call("bash", command="sleep 9", timeout_ms=300)

        assert "8 bytes" in await talk.call("write", file_path="src/a.txt", content="one\ntwo\n")
        assert "\ttwo" in await talk.call("read", file_path="src/a.txt", view_range=[2, -1])
        assert "+zwei" in await talk.call("edit", file_path="src/a.txt", old_string="two", new_string="zwei")
        assert await talk.call("glob", pattern="**/*.txt") == "/workspace/src/a.txt"
        assert "/workspace/src/a.txt:2:zwei" in await talk.call("grep", pattern="zw.i$")

        run = (await talk.facts("bash", command="read line; echo got $line; exec sleep 60", background=True))["exec_id"]
        await talk.call("write_stdin", exec_id=run, text="it\n")
        assert (await talk.call("bash_output", exec_id=run, wait_ms=5000)).startswith("got it\n[running]")
        assert "cancelled" in await talk.call("kill", exec_id=run)

        await talk.call("bash", command=f"echo {base64.b64encode(PIXEL).decode()} | base64 -d > /workspace/p.png")
        image = (await talk.client.call_tool("read", {"file_path": "p.png"})).content[1]
        assert isinstance(image, types.ImageContent)
        assert (image.mime_type, base64.b64decode(image.data)) == ("image/png", PIXEL)

        told: list[str] = []

        async def progress(_done: float, _total: float | None, message: str | None) -> None:
            told.append(message or "")

        await talk.client.call_tool("bash", {"command": "echo begin; sleep 0.8"}, progress_callback=progress)
        assert told
        assert told[0] == "6 bytes; begin"
        assert len(told) <= 4  # one in a quarter of a second

        await talk.call("bash", command="cd /workspace; mv src/a.txt .; truncate -s 1100000 /workspace/long")
        listed = {each.uri: each.name for each in (await talk.client.list_resources()).resources}
        assert "sandbox://default/files/a.txt" in listed
        assert len((await talk.client.list_resource_templates()).resource_templates) == 2
        assert await read(talk, "files/a.txt") == "one\nzwei\n"
        assert "PRETTY_NAME=" in str(await read(talk, "files/%2Fetc%2Fos-release"))
        assert await read(talk, "files/p.png") == PIXEL
        assert await read(talk, f"runs/{run}") == "got it\n"
        for place, says in {
            "files/none": "no such file",
            "files/long": "more than",
            "runs/none": "no such run",
        }.items():
            with pytest.raises(MCPError, match=says):
                await read(talk, place)


async def read(talk: Talk, place: str) -> str | bytes:
    """Return the content of a resource of the default sandbox."""
    content = (await talk.client.read_resource(f"sandbox://default/{place}")).contents[0]
    return content.text if isinstance(content, types.TextResourceContents) else base64.b64decode(content.blob)


@pytest.mark.parametrize("connect", [over_http, over_stdio])
@pytest.mark.parametrize("era", ERAS)
@on_asyncio
async def test_a_cancelled_call_ends_the_run_and_keeps_the_shell(daemon: Daemon, connect: Any, era: str) -> None:
    """By a notification in the older era and over streams, by the closed answer of HTTP in the newer one."""
    async with connect(daemon, era) as talk:
        await talk.call("bash", command="cd /tmp; sleep() { command sleep 61; }")
        with anyio.move_on_after(0.7):
            await talk.call("bash", command="sleep")
        with anyio.fail_after(patience(10)):
            while "61" in await talk.call("bash", command="pgrep -af 'sleep 6[1]'"):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        assert "cwd /tmp" in await talk.call("bash", command="type sleep >/dev/null")


@on_asyncio
async def test_a_long_answer_is_cut_and_the_rest_can_be_read(daemon: Daemon) -> None:
    """Half from the head and half from the tail, with what was left out between."""
    async with over_http(daemon) as talk:
        facts = await talk.facts("bash", command="seq 1 20000")
        assert facts["truncated"]
        assert len(facts["output"]) < 30_200
        head, _, rest = facts["output"].partition("… ")
        offset = int(rest.partition(f"bash_output exec_id={facts['exec_id']} offset=")[2].partition(" ")[0])
        part = await talk.facts("bash_output", exec_id=facts["exec_id"], offset=offset)
        assert part["bytes_total"] == facts["bytes_total"] == 108_894
        assert part["output"].startswith(f"{int(head.split()[-1]) + 1}\n")


@on_asyncio
async def test_a_sandbox_that_ended_is_made_anew_and_the_answer_says_so(daemon: Daemon) -> None:
    """In its first line, whether the end was seen by this server or by another."""
    async with over_http(daemon) as talk:
        await talk.call("bash", command="touch here")
        with daemon.client() as client:
            (session,) = client.get("/v1/sessions").json()
            client.delete(f"/v1/sessions/{session['id']}")
        text = await talk.call("bash", command="ls")
        assert text.startswith("[the sandbox 'default' had ended (user); this is a new one: files are gone]\n[exit 0")
        assert "had ended" not in await talk.call("bash", command="ls")


async def test_a_command_that_may_have_begun_is_not_repeated() -> None:
    """By a request that was lost, in a sandbox that has ended when it is sent again; one that was only refused is."""
    ended = refusal(410, "SESSION_EXPIRED", retryable=False)
    for answers, is_error in (([b"no HTTP\r\n\r\n", ended, DONE], True), ([ended, DONE], False)):
        heads: list[bytes] = []
        async with answering(answers, heads) as (url, _), SandboxClient(base_url=url) as client:
            reply = await perform(TOOLS["bash"], _CallIn(Session(client, "0" * 16)), {"command": "x"})
            assert (reply.is_error, sum(b"/exec HTTP" in head for head in heads)) == (is_error, 2)
            assert ("look whether it had its effect" in reply.text) == is_error


@on_asyncio
async def test_a_name_in_the_url_is_a_sandbox_that_all_find(daemon: Daemon) -> None:
    """Calls that come at once, over different connections, make one session; the tool `sandboxes` rules them."""
    async with over_http(daemon, query="?sandbox=build") as one, over_http(daemon, query="?sandbox=build") as two:
        async with anyio.create_task_group() as group:
            for talk in (one, two, one, two):
                group.start_soon(_touch, talk)
        with daemon.client() as client:
            assert [each["labels"] for each in client.get("/v1/sessions").json()] == [{"mcp": "build"}]
        assert "here" in await two.call("bash", command="ls")
        await one.call("sandboxes", action="create", sandbox="other")
        assert "already" in await one.fail("sandboxes", action="create", sandbox="other")
        assert [row.partition(":")[0] for row in (await one.call("sandboxes", action="list")).splitlines()] == [
            "build",
            "other",
        ]
        assert "limits: cpu" in await one.call("sandboxes", action="info", sandbox="other")
        await one.call("bash", command="touch mine", sandbox="other")
        assert "mine" not in await one.call("bash", command="ls")
        assert "line break" in await one.fail("bash", command="ls", sandbox="x\n")
        await one.call("sandboxes", action="end", sandbox="other")
        assert "no sandbox" in await one.fail("sandboxes", action="info", sandbox="other")


async def _touch(talk: Talk) -> None:
    await talk.call("bash", command="touch here")


@on_asyncio
async def test_two_keys_at_once_have_one_sandbox_of_a_name(daemon: Daemon) -> None:
    """Each makes one, and the younger goes."""
    other = key(daemon.data_dir, "create", "--name", f"other{time.time_ns()}")
    await _until_known(daemon, other)
    query = "?sandbox=shared"
    async with over_http(daemon, query=query) as mine, over_http(daemon, query=query, token=other) as theirs:
        async with anyio.create_task_group() as group:
            group.start_soon(_touch, mine)
            group.start_soon(_touch, theirs)
        assert "here" in await mine.call("bash", command="ls")
        assert "here" in await theirs.call("bash", command="ls")
    with daemon.client() as client:
        assert len(client.get("/v1/sessions").json()) == 1


@on_asyncio
async def test_a_key_that_is_known_by_another_id_has_a_default_sandbox(daemon: Daemon) -> None:
    """The client guesses the id from the form of the key; the server says it with the first session."""
    async with SandboxClient(base_url=daemon.wait_url(), api_key=KEY) as client:
        for _ in range(2):  # the second time, the first session has ended
            sandboxes = Sandboxes(client, "nosuch")
            session, _note = await sandboxes.session("default")
            assert sandboxes.key_id == client.key_id
            found = await sandboxes.find("default")
            assert found is not None
            assert found.id == session.id
            await session.destroy()


@on_asyncio
async def test_calls_that_are_left_behind_are_bounded(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may not pile up work by leaving: more calls of one key at once are refused, and so are more sessions
    of the older protocol."""
    monkeypatch.setattr(server, "MAX_CALLS", 3)
    async with SandboxClient(base_url=daemon.wait_url(), api_key=KEY) as client:
        caller = server.ToolCaller(Sandboxes(client, client.key_id))
        async with Client(server.make_server(lambda _context: caller)) as direct:
            talk = Talk(direct)
            await talk.call("bash", command=":")
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(functools.partial(talk.fail, "ports", wait_for=1, timeout_ms=500))
                await anyio.sleep(0.2)
                assert "under way" in await talk.fail("glob", pattern="*")
            await talk.call("glob", pattern="*")


async def test_no_key_takes_all_sessions_of_the_older_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key is served beside one that has as many as it may."""
    monkeypatch.setattr(server, "MAX_SESSIONS_OF_A_KEY", 2)
    mounted = server.Mounted("http://127.0.0.1:9")
    owners = [AuthorizationContext(client_id=each, issuer=None, subject=None) for each in ("one", "one", "one", "two")]
    made = [mounted._manager._admit_session(each) for each in owners]
    assert [each is not None for each in made] == [True, True, False, True]


@on_asyncio
async def test_other_shells_and_a_fresh_one(daemon: Daemon) -> None:
    """A shell is made by its name; `restart` ends what hangs in it."""
    async with over_http(daemon) as talk:
        await talk.call("bash", command="cd /tmp", shell="second")
        assert "cwd /workspace" in await talk.call("bash", command=":")
        assert "cwd /tmp" in await talk.call("bash", command=":", shell="second")
        async with anyio.create_task_group() as group:
            group.start_soon(_hang, talk)
            with anyio.fail_after(patience(10)):
                while "sleep" not in await talk.call("bash", command="pgrep -a sleep", shell="second"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert "restarted" in await talk.call("bash", restart=True)
        assert "cwd /workspace" in await talk.call("bash", command=":")
        assert "restarted" in await talk.call("bash", restart=True, shell="second")
        assert "cwd /workspace" in await talk.call("bash", command=":", shell="second")


async def _hang(talk: Talk) -> None:
    assert "cancelled" in await talk.call("bash", command="sleep 60")


@on_asyncio
async def test_a_patch_changes_several_files_or_none(daemon: Daemon) -> None:
    """The tool is there if the URL asks for it."""
    async with over_http(daemon, query="?tools=apply_patch,bash") as talk:
        assert [tool.name for tool in (await talk.client.list_tools()).tools] == ["bash", "apply_patch"]
        await talk.call("bash", command="printf 'a\\nb\\n' > x; touch gone")
        patch = (
            "*** Begin Patch\n*** Add File: new/y\n+first\n*** Delete File: gone\n"
            "*** Update File: x\n@@\n a\n-b\n+B\n*** End Patch\n"
        )
        await talk.call("apply_patch", input=patch)
        assert (
            await talk.call("bash", command="ls; cat x new/y") == "new\nx\na\nB\nfirst\n[exit 0, 0.0 s, cwd /workspace]"
        )
        assert "gone" in await talk.fail("apply_patch", input=patch.replace("Add File: new/y", "Add File: z"))
        assert "z" not in await talk.call("bash", command="ls")
        for bad in ("nothing", "*** Begin Patch\n+x\n*** End Patch", "*** Begin Patch\n*** Move to: /x\n*** End Patch"):
            assert "patch" in await talk.fail("apply_patch", input=bad)


@on_asyncio
async def test_ports_can_be_waited_for(daemon: Daemon) -> None:
    """A server in the background, and a port on which nothing will listen."""
    async with over_http(daemon) as talk:
        await talk.facts("bash", command="python3 -m http.server 8123 --bind 127.0.0.1", background=True)
        assert "127.0.0.1:8123" in await talk.call("ports", wait_for=8123, timeout_ms=int(patience(10) * 1000))
        assert "nothing listens on port 1" in await talk.fail("ports", wait_for=1, timeout_ms=1)


@on_asyncio
async def test_a_person_gets_a_link_to_a_port(daemon: Daemon) -> None:
    """By a preview of the sandbox, which is the model's to open with a key that may change it."""
    async with over_http(daemon) as talk:
        assert "no sandbox" in await talk.fail("preview", port=8123)
        await talk.call("bash", command="true")
        link, until = (await talk.call("preview", port=8123)).splitlines()
        assert re.fullmatch(r"http://8123-[0-9a-f]{24}\.localhost:\d+/\?_sandkasten_token=[\w-]{43}", link), link
        assert "port 8123" in until


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("bash", {}, "needs a `command`"),
        ("bash", {"command": 3}, "command: 3 is not of type"),
        ("bash", {"command": "x", "nonsense": 1}, "nonsense"),
        ("bash", {"command": "x", "timeout_ms": -1}, "timeout_ms"),
        ("bash", {"command": "x", "sandbox": "../etc"}, "sandbox"),
        ("read", {}, "file_path"),
        ("read", {"file_path": "x", "view_range": [1]}, "view_range"),
        ("read", {"file_path": "/proc/1/environ"}, ""),
        ("read", {"file_path": "none"}, "find the path with glob"),
        ("edit", {"file_path": "none", "old_string": "", "new_string": ""}, "old_string"),
        ("grep", {"pattern": "("}, ""),
        ("kill", {"exec_id": "none"}, "no sandbox 'default' yet"),
        ("write_stdin", {"exec_id": "none", "text": "x"}, "no sandbox 'default' yet"),
        ("sandboxes", {"action": "explode"}, "explode"),
        ("ports", {"wait_for": 10**9}, "wait_for"),
        ("glob", {"pattern": "\0"}, ""),
    ],
)
@on_asyncio
async def test_arguments_of_any_shape_are_answered_in_words(
    daemon: Daemon, tool: str, arguments: dict[str, Any], says: str
) -> None:
    """As an error of the tool that a model can mend, never as one of the protocol."""
    async with over_http(daemon) as talk:
        assert says in await talk.fail(tool, **arguments)


_ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates too
_ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.floats(allow_nan=False, allow_infinity=False) | _ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(TOOLS)), st.data())
def test_any_json_is_answered(daemon: Daemon, name: str, data: st.DataObject) -> None:
    """Arguments that no schema foresaw get a reply or an error of the protocol; the server has no fault of its own."""
    parts = {key: _ANY_JSON for key in TOOLS[name].schema["properties"] if key != "wait_for"}
    arguments = data.draw(_ANY_JSON | st.fixed_dictionaries({}, optional=parts))
    params = {"name": name, "arguments": arguments}
    with daemon.client() as client:
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        opened = client.post("/mcp", json=_initialize(), headers=_ACCEPT)
        headers = {**_ACCEPT, "mcp-session-id": opened.headers["mcp-session-id"], "Content-Type": "application/json"}
        answer = client.post("/mcp", content=json.dumps(call), headers=headers, timeout=patience(30))
        assert answer.status_code in (200, 400), answer.text
        assert "Traceback" not in answer.text
        assert client.delete("/mcp", headers=headers).status_code == 200


@on_asyncio
async def test_access_is_that_of_the_key(daemon: Daemon) -> None:
    """A key that reads sees only what reads and makes nothing; each key has a `default` of its own; a session of the
    older protocol is of use to the key that opened it alone."""
    reader = key(daemon.data_dir, "create", "--name", f"reader{time.time_ns()}", "--read-only")
    other = key(daemon.data_dir, "create", "--name", f"other{time.time_ns()}")
    await _until_known(daemon, other)
    async with over_http(daemon, token=reader) as talk:
        names = [tool.name for tool in (await talk.client.list_tools()).tools]
        assert names == ["bash_output", "read", "glob", "grep", "ports"]
        assert "may make none" in await talk.fail("glob", pattern="*")
        with pytest.raises(MCPError, match="no tool 'bash'"):
            await talk.client.call_tool("bash", {"command": ":"})
    async with over_http(daemon) as mine, over_http(daemon, token=other) as theirs:
        await mine.call("bash", command="touch mine")
        assert "mine" not in await theirs.call("bash", command="ls")
    with daemon.client() as client:
        assert len(client.get("/v1/sessions").json()) == 2
        opened = client.post("/mcp", json=_initialize(), headers=_ACCEPT)
        session = opened.headers["mcp-session-id"]
        listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
        own = client.post("/mcp", json=listing, headers={**_ACCEPT, "mcp-session-id": session})
        stolen = {**_ACCEPT, "mcp-session-id": session, "Authorization": f"Bearer {other}"}
        assert (own.status_code, client.post("/mcp", json=listing, headers=stolen).status_code) == (200, 404)


_ACCEPT = {"Accept": "application/json, text/event-stream"}


def _initialize() -> Mapping[str, Any]:  # JSON values
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}


@on_asyncio
async def test_the_way_back_to_the_daemon_is_direct_and_closed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's key is shown to no proxy, and a key that made way for others leaves no connection open."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(server, "MAX_CLIENTS", 1)
    mounted = server.Mounted(daemon.wait_url().replace("127.0.0.1", "0.0.0.0"))

    async def app(scope: Any, receive: Any, send: Any) -> None:  # of ASGI
        call = McpCall(scope["path"], KEY, may_write=True, sandbox="default", tools=None)
        await mounted.application(**attrs.asdict(call))(scope, receive, send)

    open_files = []
    async with mounted.run():
        for key_id in "abc":
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http:
                place = streamable_http_client(f"http://mcp/{key_id}", http_client=http)
                async with Client(place, mode="auto") as client:
                    assert not (await client.call_tool("sandboxes", {"action": "list"})).is_error
            open_files.append(len(os.listdir("/proc/self/fd")))
        await mounted.aclose()
    assert open_files[0] == open_files[1] == open_files[2]


async def _until_known(daemon: Daemon, token: str) -> None:
    """Wait until the daemon has read a new key."""
    async with httpx.AsyncClient(base_url=daemon.wait_url(), headers={"Authorization": f"Bearer {token}"}) as client:
        with anyio.fail_after(patience(10)):
            while (await client.get("/v1/sessions")).status_code == 401:  # noqa: ASYNC110
                await anyio.sleep(0.02)


def test_requests_that_are_not_served(daemon: Daemon) -> None:
    """No key, an unknown tool or name in the URL, a body too large or no JSON: refused, and the server lives."""
    with daemon.client() as client:
        assert httpx.post(f"{daemon.wait_url()}/mcp", json=_initialize(), headers=_ACCEPT).status_code == 401
        for query in ("?tools=nothing", "?sandbox=a/b", "?sandbox=", "?what=1"):
            answer = client.post(f"/mcp{query}", json=_initialize(), headers=_ACCEPT)
            assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST"), query
        assert client.post("/mcp", content=b"x" * (5 << 20), headers=_ACCEPT).status_code == 413
        for body in (b"", b"{", b"[]", b'{"jsonrpc": "2.0"}', b"\xff"):
            headers = {**_ACCEPT, "Content-Type": "application/json"}
            assert client.post("/mcp", content=body, headers=headers).status_code == 400, body
        assert client.post("/mcp", json=_initialize(), headers=_ACCEPT).status_code == 200


def test_the_list_of_tools_is_short() -> None:
    """Every conversation pays for its length: at most 10 kB for all tools, output schemas included."""
    described = [
        server._described(tool).model_dump(by_alias=True, exclude_none=True, mode="json") for tool in TOOLS.values()
    ]
    assert len(json.dumps(described, separators=(",", ":"))) < 10_000
    assert [tool.name for tool in chosen(None)] == [tool.name for tool in TOOLS.values() if tool.name != "apply_patch"]
    hints = {each["name"]: each["annotations"] for each in described}
    reads = {name for name, each in hints.items() if each["readOnlyHint"]}
    assert reads == {"bash_output", "read", "glob", "grep", "ports"}
    assert {name for name, each in hints.items() if each["openWorldHint"]} == {"bash", "write_stdin"}
    destroys = {name for name, each in hints.items() if each.get("destructiveHint", name not in reads)}
    assert destroys == hints.keys() - reads - {"preview"}


async def test_without_the_extra_the_answer_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """501 with the sentence, not a traceback."""
    monkeypatch.setattr(front, "find_spec", lambda _name: None)
    with pytest.raises(NotInstalled, match=r"sandkasten-runtime\[server,mcp\]"):
        await front.McpFront()({}, _nothing, _nothing)


async def _nothing(*_: object) -> Any:
    raise AssertionError


def test_the_daemon_stops_beside_open_conversations(own_daemon: Daemon) -> None:
    """A stop in good order is not held up by a client that listens for notifications."""
    daemon = own_daemon
    with daemon.client() as client:
        session = client.post("/mcp", json=_initialize(), headers=_ACCEPT).headers["mcp-session-id"]
        headers = {"Accept": "text/event-stream", "mcp-session-id": session}
        with contextlib.suppress(httpx.RemoteProtocolError), client.stream("GET", "/mcp", headers=headers) as stream:
            assert stream.status_code == 200
            began = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - began < patience(10)


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    with (
        tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory,
        running_daemon(Path(directory), SANDKASTEN_SERVER_GRACEFUL_TIMEOUT_S="0.3") as daemon,
    ):
        daemon.wait_url()
        yield daemon
