"""Handlers for the tools that Claude was trained with: `bash_20250124` and `text_editor_20250728`.

`sandbox_tools(session)` is for the tool runner of the package `anthropic`, which is imported only there. A loop of
one's own sends the `definition` of `Bash` and `TextEditor` as tools, and calls them with the input of each tool use.
`agent_toolset(session)` has the tools of `agent_toolset_20260401`, for that package's worker. `claude_agent_options` is
for the Claude Agent SDK, which speaks to the server's `/mcp`.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

from sandkasten import errors
from sandkasten.mcp.tools import TOOLS, Schema, Tool, ToolCall, perform
from sandkasten.sdk import Session
from sandkasten.sdk.waiting import Lock

MAX_CHARS = 30_000
"""Longest answer, in characters: half from its head and half from its tail."""
SHELL = "claude"
TIMEOUT_MS = 120_000

_LEFT_OUT = ("background", "shell")
"""Parameters of the server's MCP tools that the toolset does not have."""

Input = Mapping[str, Any]  # JSON values of a tool use


class ToolFailed(Exception):
    """The tool could not do it; the text is for the model, as a result with `is_error`."""


_TYPES = {"string": str, "boolean": bool, "integer": int, "array": list}
_TEXT: Schema = {"type": "string"}
_EDITOR: Mapping[str, Schema] = {
    **dict.fromkeys(("command", "path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
    "insert_line": {"type": "integer"},
    "view_range": TOOLS["read"].properties["view_range"],
}


def _checked(properties: Mapping[str, Schema], input: Input) -> Input:
    """Return the parameters that have a value, each of the type of its schema; bounds are the server's to check.

    Raises:
        ToolFailed: a value is of another type.
    """
    found = {name: value for name, value in input.items() if name in properties and value is not None}
    for name, value in found.items():
        schema = properties[name]
        is_good = type(value) is _TYPES[schema["type"]]
        if is_good and "items" in schema:
            is_good = len(value) == schema["minItems"] and all(type(each) is int for each in value)
        if not is_good:
            raise ToolFailed(f"{name}: {value!r} is no {schema['type']}"[:500])
    return found


class Bash:
    """Tool `bash`: a persistent shell of its own in the session, made at the first command."""

    definition: Mapping[str, str] = {"type": "bash_20250124", "name": "bash"}

    def __init__(self, session: Session, *, timeout_ms: int = TIMEOUT_MS, shell: str = SHELL) -> None:
        """Run commands in a session, each for `timeout_ms` at most, in the shell of that name."""
        self._session, self._timeout_ms, self._shell = session, timeout_ms, shell
        self._opening = Lock()

    async def __call__(self, input: Input) -> str:
        """Run the command of a tool use, or begin a fresh shell; a caller that is cancelled ends the command.

        Raises:
            ToolFailed: there is no command, or it could not be run. A command that failed is an answer.
        """
        command = input.get("command")
        is_restart = bool(input.get("restart"))
        if not is_restart and (not isinstance(command, str) or not command):
            raise ToolFailed("bash needs a `command`, or `restart`")
        try:
            if is_restart:
                await self._restart()
                return "tool has been restarted."
            try:
                result = await self._exec(str(command))
            except errors.ShellNotFound:
                await self._open()
                result = await self._exec(str(command))
        except errors.ClientError as error:
            raise ToolFailed(str(error)) from error
        notes = []
        if result.timed_out:
            notes.append(f"timed out after {self._timeout_ms / 1000:g} s; the shell is kept")
        elif result.cause not in ("exited", "signalled"):
            notes.append(result.cause)
        if result.exit_code and not result.timed_out:
            notes.append(f"exit code {result.exit_code}")
        text = _shortened(result.output)
        return text + (f"{_break(text)}[{', '.join(notes)}]" if notes else "")

    async def _exec(self, command: str) -> Any:  # ExecResult
        return await self._session.exec(command, shell=self._shell, timeout_ms=self._timeout_ms, on_timeout="result")

    async def _open(self) -> None:
        async with self._opening:  # the name is taken before the shell is there
            try:
                await self._session.shell(self._shell)
            except errors.Conflict:
                pass  # another call has opened it

    async def _restart(self) -> None:
        try:
            await self._session.close_shell(self._shell)  # ends what runs in it
        except errors.ShellNotFound:
            pass
        await self._open()


class TextEditor:
    """Tool `str_replace_based_edit_tool`: the commands view, create, str_replace and insert."""

    def __init__(self, session: Session, *, max_characters: int | None = None) -> None:
        """Edit files of a session; a view has at most `max_characters`, which the model is told."""
        self._files = session.files
        self._max_chars = max_characters or MAX_CHARS
        limit = {} if max_characters is None else {"max_characters": max_characters}
        self.definition: Mapping[str, Any] = {
            "type": "text_editor_20250728",
            "name": "str_replace_based_edit_tool",
            **limit,
        }

    async def __call__(self, input: Input) -> str:
        """Do what a tool use asks.

        Raises:
            ToolFailed: it could not be done; nothing was changed.
        """
        input = _checked(_EDITOR, input)
        commands: dict[Any, Callable[[Input], Awaitable[str]]] = {
            "view": self._view,
            "create": self._create,
            "str_replace": self._replace,
            "insert": self._insert,
        }
        if (command := commands.get(input.get("command"))) is None:
            raise ToolFailed(f"there is no command {input.get('command')!r}; there are {', '.join(commands)}")
        try:
            return await command(input)
        except KeyError as error:
            raise ToolFailed(f"the command needs {error}") from error
        except errors.Ambiguous as error:
            lines = ", ".join(map(str, error.details.get("lines", ())))
            raise ToolFailed(f"old_str is there more than once, in lines {lines}; make it unique") from error
        except errors.ClientError as error:
            raise ToolFailed(str(error)) from error

    async def _view(self, input: Input) -> str:
        first, last = (*(input.get("view_range") or ()), None, None)[:2]
        view = await self._files.view(input["path"], first=first, last=None if last == -1 else last)
        text = _shortened(view.text, self._max_chars)
        if view.truncated or view.last < view.lines:
            text += f"{_break(text)}[lines {view.first} to {view.last} of {view.lines}]"
        return text or "[the file is empty]"

    async def _create(self, input: Input) -> str:
        written = await self._files.write(input["path"], input["file_text"])
        return f"wrote {written.size} bytes to {written.path}"

    async def _replace(self, input: Input) -> str:
        edit = {"path": input["path"], "op": "replace", "old": input["old_str"], "new": input.get("new_str") or ""}
        return await self._edit(edit)

    async def _insert(self, input: Input) -> str:
        text = input["insert_text"]
        text += "" if text.endswith("\n") else "\n"
        return await self._edit({"path": input["path"], "op": "insert", "line": input["insert_line"], "text": text})

    async def _edit(self, edit: Mapping[str, Any]) -> str:
        (made,) = await self._files.edit([edit])
        return _shortened(made.diff or f"edited {made.path}", self._max_chars)


def sandbox_tools(session: Session, *, timeout_ms: int = TIMEOUT_MS) -> list[Any]:  # tools of the tool runner
    """Return both tools for `AsyncAnthropic().beta.messages.tool_runner(tools=...)`.

    Raises:
        ImportError: the package `anthropic` is not installed.
    """
    from anthropic.lib.tools import BetaAsyncBuiltinFunctionTool, ToolError

    class SandboxTool(BetaAsyncBuiltinFunctionTool):
        def __init__(self, handler: Bash | TextEditor) -> None:
            self._handler = handler

        def to_dict(self) -> Any:  # the runner's type of a tool's definition
            return dict(self._handler.definition)

        async def call(self, input: object) -> str:
            try:
                return await self._handler(input if isinstance(input, Mapping) else {})
            except ToolFailed as error:
                raise ToolError(str(error)) from error

    return [SandboxTool(Bash(session, timeout_ms=timeout_ms)), SandboxTool(TextEditor(session))]


class _CallIn(ToolCall):
    """A call of a tool in one session, which the caller made."""

    def __init__(self, session: Session) -> None:
        self._session, self.report, self.notes = session, None, []

    async def session(self, *, may_make: bool = True) -> Session:
        """Return that session; none is ever made."""
        return self._session

    def forget(self) -> None:
        """Do nothing: no other session takes the place of one that has ended."""


def agent_toolset(session: Session) -> list[Any]:  # tools of the package's runners
    """Return the tools of `agent_toolset_20260401` (`bash`, `read`, `write`, `edit`, `glob`, `grep`), which work in the
    session: for `EnvironmentWorker(tools=...)` and the asynchronous tool runners, where the package's own tools work on
    the machine that they run on.

    Raises:
        ImportError: the package `anthropic` is not installed.
    """
    from anthropic.lib.tools import BetaAsyncBuiltinFunctionTool, ToolError

    class AgentTool(BetaAsyncBuiltinFunctionTool):
        def __init__(self, tool: Tool) -> None:
            self._tool = tool
            self._properties = {name: each for name, each in tool.properties.items() if name not in _LEFT_OUT}

        def to_dict(self) -> Any:  # the runner's type of a tool's definition
            schema = {"type": "object", "properties": self._properties, "required": list(self._tool.required)}
            return {"name": self._tool.name, "description": self._tool.description, "input_schema": schema}

        async def call(self, input: object) -> Any:  # text, or the runner's type of a list of content
            given = input if isinstance(input, Mapping) else {}
            try:
                arguments = _checked(self._properties, given)
            except ToolFailed as error:
                raise ToolError(str(error)) from error
            if missing := [name for name in self._tool.required if name not in arguments]:
                raise ToolError(f"{self._tool.name} needs `{missing[0]}`")
            reply = await perform(self._tool, _CallIn(session), arguments)
            if reply.is_error:
                raise ToolError(reply.text)
            return [{"type": "text", "text": reply.text}, *map(_image, reply.images)] if reply.images else reply.text

    return [AgentTool(TOOLS[name]) for name in ("bash", "read", "write", "edit", "glob", "grep")]


def _image(image: tuple[str, bytes]) -> Mapping[str, Any]:  # JSON values
    media_type, data = image
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def claude_agent_options(base_url: str, api_key: str | None = None, *, sandbox: str = "default") -> dict[str, Any]:
    """Return arguments of `ClaudeAgentOptions`: the sandbox of that name by MCP, and no tool of the SDK's own, of which
    many work on this machine.

    `ClaudeAgentOptions(**claude_agent_options(url, key), permission_mode=...)`. docs/mcp.md describes the tools.
    """
    url = f"{base_url.rstrip('/')}/mcp?sandbox={quote(sandbox, safe='')}"
    server: dict[str, Any] = {"type": "http", "url": url}
    if api_key:
        server["headers"] = {"Authorization": f"Bearer {api_key}"}
    return {"mcp_servers": {"sandkasten": server}, "tools": [], "allowed_tools": ["mcp__sandkasten"]}


def _break(text: str) -> str:
    return "" if not text or text.endswith("\n") else "\n"


def _shortened(text: str, max_chars: int = MAX_CHARS) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
