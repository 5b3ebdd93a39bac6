"""The table of tools as an MCP server: over standard input and output, and below `/mcp` of the daemon.

The one file that imports the `mcp` package (0.6 s, 35 MB), so it is imported when the first client comes. The package
speaks both eras of the protocol: with a handshake and sessions (2024-11-05 to 2025-11-25), and without (2026-07-28).
"""

from __future__ import annotations

import base64
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, cast
from urllib.parse import quote, unquote

import anyio
import anyio.to_thread
import jsonschema
import mcp_types as types
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError

from sandkasten import errors
from sandkasten.mcp.sandboxes import DEFAULT, NAME, Sandboxes
from sandkasten.mcp.tools import TOOLS, Tool, ToolCall, ToolReply, chosen, perform
from sandkasten.sdk import SandboxClient, Session

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Context = ServerRequestContext[Any, Any]

MAX_SESSIONS, MAX_SESSIONS_OF_A_KEY = 1000, 100
"""Sessions of the older protocol that are open at once, of all keys."""
MAX_CLIENTS = 256
"""API keys whose connections to the daemon are kept."""
MAX_CALLS = 32
"""Most calls of one key at once."""
MAX_LISTED = 100
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_RESOURCE_BYTES = 1024 * 1024
_CALLER = "sandkasten.mcp.caller"
_SCHEME = "sandbox://"
_INSTRUCTIONS = (
    "The tools act in a Linux sandbox of your own, with a persistent shell and /workspace for files. It is made at the "
    "first use and ends when it is idle for long. Long output is cut in the middle: bash_output reads the rest."
)
_VALIDATORS = {name: jsonschema.Draft202012Validator(tool.schema) for name, tool in TOOLS.items()}


@dataclass(frozen=True)
class ToolCaller:
    """The sender of a request: its sandboxes, the one that is meant unless a call names another, and its tools."""

    sandboxes: Sandboxes
    sandbox: str = DEFAULT
    tools: Sequence[Tool] = field(default_factory=lambda: chosen(None))


def check_name(name: str) -> str:
    """Return the name of a sandbox. Raises `ValueError`."""
    if not NAME.match(name):
        raise ValueError(f"the name of a sandbox has letters, digits, `.`, `_` and `-`, at most 63: not {name[:80]!r}")
    return name


def make_server(caller_of: Callable[[Context], ToolCaller]) -> Server[Any]:
    """Return the MCP server; `caller_of` says who sent a request."""

    async def list_tools(context: Context, _params: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in caller_of(context).tools])

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        caller = caller_of(context)
        tool = next((each for each in caller.tools if each.name == params.name), None)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name[:80]!r}")
        arguments = params.arguments or {}
        if (fault := jsonschema.exceptions.best_match(_VALIDATORS[tool.name].iter_errors(arguments))) is not None:
            return _result(ToolReply(_fault_in_words(fault), is_error=True))
        call = ToolCall(caller.sandboxes, arguments.get("sandbox", caller.sandbox))
        if not NAME.match(call.sandbox):  # the schema's `$` lets a line break pass
            return _result(ToolReply("sandbox: a name has no line break", is_error=True))
        if (context.meta or {}).get("progress_token") is not None:
            call.report = lambda seconds, message: context.session.report_progress(seconds, None, message)
        # A call of the older protocol goes on when its client has left, so a client could leave any number behind.
        if caller.sandboxes.calls >= MAX_CALLS:
            return _result(ToolReply(f"{MAX_CALLS} calls are under way; wait for one of them", is_error=True))
        caller.sandboxes.calls += 1
        try:
            return _result(await perform(tool, call, arguments))
        finally:
            caller.sandboxes.calls -= 1

    async def list_resources(context: Context, _params: object) -> types.ListResourcesResult:
        caller = caller_of(context)
        found: list[types.Resource] = []
        with _errors_of_protocol():
            if (info := await caller.sandboxes.find(caller.sandbox)) is not None:
                for entry in await Session(caller.sandboxes.client, info.id).files.list(limit=MAX_LISTED):
                    if entry.type == "file":
                        uri = f"{_SCHEME}{caller.sandbox}/files/{quote(entry.path.removeprefix('/workspace/'))}"
                        found.append(types.Resource(name=entry.name, uri=uri, size=entry.size))
        return types.ListResourcesResult(resources=found)

    async def list_templates(_context: Context, _params: object) -> types.ListResourceTemplatesResult:
        rows = (
            ("file", "files/{path}", "a file: below /workspace, or %2F and an absolute path"),
            ("run", "runs/{exec_id}", "the output of a run"),
        )
        templates = [
            types.ResourceTemplate(name=name, uri_template=f"{_SCHEME}{{sandbox}}/{path}", description=words)
            for name, path, words in rows
        ]
        return types.ListResourceTemplatesResult(resource_templates=templates)

    async def read_resource(context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        with _errors_of_protocol():
            content = await _read_resource(caller_of(context).sandboxes, params.uri)
        return types.ReadResourceResult(contents=[content])

    return Server(
        "sandkasten",
        version=version("sandkasten-runtime"),
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )


def _described(tool: Tool) -> types.Tool:
    hints = types.ToolAnnotations(
        read_only_hint=tool.reads,
        destructive_hint=None if tool.reads else not tool.is_additive,  # says nothing of a tool that reads
        open_world_hint=tool.is_open,
    )
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.schema,
        output_schema=None if tool.output is None else dict(tool.output),
        annotations=hints,
    )


def _result(reply: ToolReply) -> types.CallToolResult:
    content: list[types.ContentBlock] = [types.TextContent(text=reply.text)]
    for media_type, data in reply.images:
        content.append(types.ImageContent(data=base64.b64encode(data).decode("ascii"), mime_type=media_type))
    return types.CallToolResult(content=content, structured_content=reply.structured, is_error=reply.is_error)


def _fault_in_words(fault: jsonschema.ValidationError) -> str:
    where = "/".join(str(part) for part in fault.absolute_path)
    return f"{where or 'the arguments'}: {fault.message}"[:500]


@contextmanager
def _errors_of_protocol() -> Iterator[None]:
    """Turn errors of the server into those of the protocol."""
    try:
        yield
    except errors.SandkastenError as error:
        raise MCPError(types.INVALID_PARAMS, error.message) from error


async def _read_resource(sandboxes: Sandboxes, uri: str) -> types.TextResourceContents | types.BlobResourceContents:
    name, _, rest = uri.removeprefix(_SCHEME).partition("/")
    kind, _, what = rest.partition("/")
    if not uri.startswith(_SCHEME) or kind not in ("files", "runs") or not NAME.match(name) or not what:
        raise MCPError(types.INVALID_PARAMS, f"a resource is {_SCHEME}NAME/files/PATH or {_SCHEME}NAME/runs/EXEC_ID")
    info = await sandboxes.find(name)
    if info is None:
        raise MCPError(types.INVALID_PARAMS, f"there is no sandbox {name!r}")
    session = Session(sandboxes.client, info.id)
    if kind == "runs":
        part = await session.run(unquote(what)).output(limit=MAX_RESOURCE_BYTES)
        return types.TextResourceContents(uri=uri, text=part.data.decode(errors="replace"))
    path = unquote(what)
    data = await session.files.read_bytes(path, length=MAX_RESOURCE_BYTES + 1)
    if len(data) > MAX_RESOURCE_BYTES:
        raise MCPError(types.INVALID_PARAMS, f"the file has more than {MAX_RESOURCE_BYTES} bytes")
    try:
        return types.TextResourceContents(uri=uri, text=data.decode())
    except UnicodeDecodeError:
        return types.BlobResourceContents(uri=uri, blob=base64.b64encode(data).decode("ascii"))


# Standard input and output --------------------------------------------------------------------------------------------


async def serve_stdio(client: SandboxClient, *, sandbox: str = DEFAULT, tools: Sequence[str] | None = None) -> None:
    """Speak MCP on standard input and output until the input ends. Nothing else may write to standard output.

    Raises:
        ValueError: the name of the sandbox is malformed, or there is no such tool.
    """
    caller = ToolCaller(Sandboxes(client, client.key_id), check_name(sandbox), chosen(tools))
    server = make_server(lambda _context: caller)
    async with stdio_server(cast("anyio.AsyncFile[str]", _lines_of_input())) as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


async def _lines_of_input() -> AsyncIterator[str]:
    """Yield the lines of standard input; while none comes, can be cancelled, as the package's own reader can not."""
    while line := await anyio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True):
        yield line.decode("utf-8", "replace")


# Below the daemon's front ---------------------------------------------------------------------------------------------


class Mounted:
    """The server below the daemon's front, for all keys. Its tools go through the SDK back to the daemon's own address.

    So every step of a tool is a request with the caller's key, and the front decides about it: nothing is reachable by
    MCP that is not by HTTP.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._clients: OrderedDict[tuple[str, str | None], _Client] = OrderedDict()
        self._manager = _SharedManager(
            make_server(_caller_of_request),
            max_request_body_size=MAX_BODY_BYTES,
            max_sessions=MAX_SESSIONS,
        )

    def run(self) -> AbstractAsyncContextManager[None]:
        """Serve while the context is open. At most once."""
        return self._manager.run()

    def application(
        self, *, key_id: str, api_key: str | None, may_write: bool, sandbox: str, tools: Sequence[str] | None
    ) -> Application:
        """Return what answers one request, whose key the front has checked.

        Raises:
            ValueError: the name of the sandbox is malformed, or there is no such tool.
        """
        name, chosen_tools = check_name(sandbox), chosen(tools, may_write=may_write)
        client, dropped = self._client(key_id, api_key, may_write)
        caller = ToolCaller(client.sandboxes, name, chosen_tools)
        # A session of the older protocol belongs to the key that opened it.
        user = AuthenticatedUser(AccessToken(token="", client_id=key_id, scopes=[]))

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            client.in_use += 1
            try:
                for each in dropped:
                    await each.close()
                await self._manager.handle_request({**scope, "user": user, _CALLER: caller}, receive, send)
            finally:
                client.in_use -= 1

        return answer

    async def aclose(self) -> None:
        """Close the connections to the daemon."""
        for each in self._clients.values():
            await each.sandboxes.client.close()

    def _client(self, key_id: str, api_key: str | None, may_write: bool) -> tuple[_Client, list[SandboxClient]]:
        """Return the client of a key, and those that had to make room for it, which are to be closed."""
        place, dropped = (key_id, api_key), list[SandboxClient]()
        if (found := self._clients.get(place)) is None:
            while len(self._clients) >= MAX_CLIENTS:
                oldest = next((each for each, client in self._clients.items() if not client.in_use), None)
                if oldest is None:
                    break
                dropped.append(self._clients.pop(oldest).sandboxes.client)
            client = SandboxClient(base_url=self._url, api_key=api_key, use_proxy=False)  # a proxy would see the key
            found = self._clients[place] = _Client(Sandboxes(client, key_id, may_write))
        self._clients.move_to_end(place)
        return found, dropped


class _SharedManager(StreamableHTTPSessionManager):
    """No key may take all sessions of the older protocol; one that asks for too many is answered 503."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        own = sum(owner == requestor for owner in self._session_owners.values())
        return None if own >= MAX_SESSIONS_OF_A_KEY else super()._admit_session(requestor)


def _caller_of_request(context: Context) -> ToolCaller:
    assert context.request is not None  # every message came by HTTP
    caller = context.request.scope[_CALLER]
    assert isinstance(caller, ToolCaller)
    return caller


@dataclass
class _Client:
    sandboxes: Sandboxes
    in_use: int = 0
