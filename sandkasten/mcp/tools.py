"""The table of tools: names and parameters that models were trained with, each a plain function over the SDK.

A tool takes a `ToolCall` and its arguments, and returns a `ToolReply`. Nothing here knows the protocol. A command that
failed is a reply; `is_error` is for what the tool could not do, and its text says what would work. To add a tool, write
its function and its row.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

from sandkasten import errors
from sandkasten.mcp.sandboxes import DEFAULT, NAME_PATTERN, NoSandbox, Sandboxes
from sandkasten.mcp.text import MAX_CHARS, clean, ending, shorten, words_of_size
from sandkasten.sdk import Run, Session
from sandkasten.sdk.types import ExecResult
from sandkasten.sdk.wire import new_id

Schema = Mapping[str, Any]  # JSON values
Arguments = Mapping[str, Any]  # JSON values that fit the tool's schema
Report = Callable[[float, str], Awaitable[None]]
"""Sends progress: seconds so far, and the state in words."""

COMMAND_MS = 120_000
"""Time of a command that names none, in ms: that of the tool which models were trained with."""
MAX_WAIT_MS = 600_000
PROGRESS_S = 0.25
POLL_S = 0.2
MAX_IMAGE_BYTES = 5_000_000
MAX_MATCHES = 200
MAX_PATHS = 1000
_OUTPUT_BYTES = 1024 * 1024
_IMAGES = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}


@dataclass
class ToolReply:
    """The answer of a tool: text, images as media type and bytes, and `structured` by the tool's output schema."""

    text: str
    structured: dict[str, Any] | None = None  # JSON values
    images: Sequence[tuple[str, bytes]] = ()
    is_error: bool = False


@dataclass
class ToolCall:
    """One call of a tool: whose sandboxes, which of them, and where progress goes, if the client asked for it.

    `notes` are lines for the head of the reply.
    """

    sandboxes: Sandboxes
    sandbox: str = DEFAULT
    report: Report | None = None
    notes: list[str] = field(default_factory=list)

    async def session(self, *, may_make: bool = True) -> Session:
        """Return the session of the sandbox, made if there is none. Raises `NoSandbox`: there is none, and `may_make`
        is false."""
        session, note = await self.sandboxes.session(self.sandbox, may_make=may_make)
        if note:
            self.notes.append(note)
        return session

    def forget(self) -> None:
        """Forget the sandbox, which has ended: the next use finds or makes another."""
        self.sandboxes.forget(self.sandbox)


@dataclass(frozen=True)
class Tool:
    """A row of the table. `properties` are the parameters as JSON Schema; `reads`: the tool changes nothing, and
    `is_additive`: it only adds.

    `is_open`: programs reach by it what the sandbox's network lets them reach. `is_default`: the tool is there unless a
    client chooses.
    """

    name: str
    description: str
    properties: Mapping[str, Schema]
    run: Callable[[ToolCall, Arguments], Awaitable[ToolReply]]
    required: Sequence[str] = ()
    reads: bool = False
    output: Schema | None = None
    is_default: bool = True
    is_additive: bool = False
    is_open: bool = False

    @property
    def schema(self) -> dict[str, Any]:  # JSON values
        """The JSON Schema of the arguments."""
        properties = {**self.properties, "sandbox": _SANDBOX}
        made: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        return made | ({"required": list(self.required)} if self.required else {})


async def perform(tool: Tool, call: ToolCall, arguments: Arguments) -> ToolReply:
    """Run a tool; errors become replies that say what would work. A sandbox that has ended is made anew once, unless
    the tool may have begun its work in it."""
    for has_ended in (False, True):
        try:
            reply = await tool.run(call, arguments)
            break
        except (errors.SessionExpired, errors.SessionNotFound) as error:
            call.forget()
            if has_ended or error.may_have_begun:
                reply = ToolReply(_in_words(error), is_error=True)
                break
        except NoSandbox as error:
            reply = ToolReply(str(error), is_error=True)
            break
        except errors.SandkastenError as error:
            reply = ToolReply(_in_words(error), is_error=True)
            break
    reply.text = "\n".join([*dict.fromkeys(call.notes), reply.text])
    return reply


_ADVICE: Mapping[type[errors.SandkastenError], str] = {
    errors.ShellBusy: "wait for it, end it with kill, or give another `shell`",
    errors.Capacity: "try again in a moment",
    errors.QuotaExceeded: "end a sandbox with the tool sandboxes, or try again later",
    errors.Ambiguous: "add lines around old_string until it is unique, or set replace_all",
    errors.FileNotFound: "find the path with glob",
    errors.ExecNotFound: "the exec_id belongs to another sandbox, or to none",
    errors.ExecGone: "its output is not kept any more; run the command again",
    errors.Uncertain: "look whether it had its effect before you repeat it",
    errors.IsADirectory: "name a file in it",
}


def _in_words(error: errors.SandkastenError) -> str:
    cause = errors.Uncertain("") if error.may_have_begun else error
    advice = next((text for cls, text in _ADVICE.items() if isinstance(cause, cls)), "")
    details = "; ".join(f"{name}: {value}" for name, value in error.details.items() if name != "request_id")
    return ". ".join(part for part in (error.message.rstrip("."), details, advice) if part)[:2000]


# Commands -------------------------------------------------------------------------------------------------------------


async def _bash(call: ToolCall, arguments: Arguments) -> ToolReply:
    shell = arguments.get("shell")
    if arguments.get("restart"):
        return await _restart(await call.session(), shell)
    command = arguments.get("command")
    if not command:
        return ToolReply("bash needs a `command`, or `restart`", is_error=True)
    session = await call.session()
    if arguments.get("background"):
        run = await session.process(command, merged=True)
        return ToolReply(
            f"[in the background, exec_id={run.id}: read it with bash_output, end it with kill]",
            {"output": "", "exec_id": run.id, "is_running": True},
        )
    exec_id = new_id()

    async def work() -> ExecResult:
        limit_ms = arguments.get("timeout_ms") or COMMAND_MS
        return await session.exec(command, timeout_ms=limit_ms, shell=shell, on_timeout="result", exec_id=exec_id)

    run = session.run(exec_id)
    try:
        result = await _reporting(call, run, work)
    except errors.ShellNotFound:
        assert shell is not None  # the default shell is always there
        with suppress(errors.Conflict):  # made by a call that came at once
            await session.shell(shell)
        result = await _reporting(call, run, work)
    advice = f"bash_output exec_id={exec_id} offset={{}}"
    text, is_cut = shorten(clean(result.output), advice, missing=result.bytes_omitted or 0)
    is_cut |= result.truncated
    return ToolReply(
        f"{_line(text)}{ending(result)}",
        {
            "output": text,
            "exit_code": result.exit_code,
            "cause": result.cause,
            "cwd": result.cwd,
            "exec_id": exec_id,
            "duration_ms": result.duration_ms,
            "truncated": is_cut,
            "bytes_total": result.bytes_total,
        },
    )


async def _restart(session: Session, shell: str | None) -> ToolReply:
    """End what runs in a shell and begin a fresh one; the default shell keeps its directory and exported variables."""
    found = next((each for each in await session.shells() if each.name == (shell or "default")), None)
    if found is None:
        return ToolReply(f"there is no shell {shell!r}; a command makes it", is_error=True)
    for exec_id in ([found.running.exec_id] if found.running else []) + list(found.queued):
        try:
            await session.run(exec_id).cancel(now=True)
        except (errors.ExecNotFound, errors.ExecEnded, errors.ExecGone):
            pass
    if shell is None or shell == "default":
        await session.exec("cd /workspace; exit 0", timeout_ms=10_000, on_timeout="result")
    else:
        await session.close_shell(shell)
        await session.shell(shell)
    kept = "; exported variables are kept" if shell in (None, "default") else ""
    return ToolReply(f"[the shell was restarted, cwd /workspace{kept}]", {"output": ""})


async def _reporting(call: ToolCall, run: Run, work: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
    """Return what `work` returns, and report the run's last line and bytes meanwhile."""
    report = call.report
    if report is None:
        return await work()
    began = time.monotonic()

    async def tell() -> None:
        while True:
            await anyio.sleep(PROGRESS_S)
            try:
                info = await run.info()
            except errors.SandkastenError:
                continue  # it has not begun yet
            size = words_of_size(info.stdout_bytes + info.stderr_bytes)
            await report(time.monotonic() - began, f"{size}; {clean(info.last_line)[:200]}")

    results: list[ExecResult] = []
    failure: errors.SandkastenError | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(tell)
        try:
            results.append(await work())
        except errors.SandkastenError as error:  # not through the group, which would wrap it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[0]


async def _bash_output(call: ToolCall, arguments: Arguments) -> ToolReply:
    run = await _known_run(call, arguments)
    offset = arguments.get("offset") or 0
    deadline = time.monotonic() + (arguments.get("wait_ms") or 0) / 1000
    while True:
        part = await run.output(offset=offset, limit=_OUTPUT_BYTES)
        if part.data or part.is_final or time.monotonic() >= deadline:
            break
        await anyio.sleep(min(POLL_S, max(deadline - time.monotonic(), 0)))
    info = await run.info()
    end = info.end
    text, is_cut = shorten(clean(part.data.decode(errors="replace")), "read on from offset={}", offset=offset)
    state = ending(end) if end is not None else f"[{info.state}]"
    more = "" if part.is_final else f"[next offset={part.next_offset} of {part.total_bytes} bytes so far]"
    facts = {"output": text, "exec_id": info.exec_id, "is_running": end is None, "next_offset": part.next_offset}
    facts |= {"truncated": is_cut, "bytes_total": part.total_bytes}
    if end is not None:
        facts |= {"exit_code": end.exit_code, "cause": end.cause, "duration_ms": end.duration_ms}
    return ToolReply(f"{_line(text)}{state}{more}", facts)


async def _known_run(call: ToolCall, arguments: Arguments) -> Run:
    return (await call.session(may_make=False)).run(arguments["exec_id"])


async def _write_stdin(call: ToolCall, arguments: Arguments) -> ToolReply:
    run = await _known_run(call, arguments)
    text = arguments.get("text") or ""
    if text:
        await run.send(text)
    if arguments.get("close"):
        await run.close_input()
    return ToolReply(f"[{len(text.encode())} bytes written{', input closed' if arguments.get('close') else ''}]")


async def _kill(call: ToolCall, arguments: Arguments) -> ToolReply:
    info = await (await _known_run(call, arguments)).cancel()
    return ToolReply(f"[{info.exec_id} {info.state}]" if info.end is None else ending(info.end))


# Files ----------------------------------------------------------------------------------------------------------------


async def _read(call: ToolCall, arguments: Arguments) -> ToolReply:
    path = arguments["file_path"]
    files = (await call.session()).files
    if (media_type := _IMAGES.get(path.rpartition(".")[2].lower())) is not None:
        size = (await files.stat(path, follow=True)).size
        if size > MAX_IMAGE_BYTES:
            text = f"{path} has {words_of_size(size)}; an image may have {words_of_size(MAX_IMAGE_BYTES)}"
            return ToolReply(text, is_error=True)
        data = await files.read_bytes(path, length=MAX_IMAGE_BYTES + 1)
        if len(data) > MAX_IMAGE_BYTES:
            return ToolReply(f"{path} grew while it was read", is_error=True)
        return ToolReply(f"[{path}, {words_of_size(len(data))}]", images=[(media_type, data)])
    first, last = (*(arguments.get("view_range") or ()), None, None)[:2]
    view = await files.view(path, first=first, last=None if last == -1 else last)
    text, is_cut = shorten(view.text, "a smaller view_range shows it")
    if view.truncated or is_cut or view.last < view.lines:
        text = f"{_line(text)}[lines {view.first} to {view.last} of {view.lines}]"
    return ToolReply(text)


async def _write(call: ToolCall, arguments: Arguments) -> ToolReply:
    path = arguments["file_path"]
    written = await (await call.session()).files.write(path, arguments["content"])
    return ToolReply(f"[{written.path}, {words_of_size(written.size)} written]")


async def _edit(call: ToolCall, arguments: Arguments) -> ToolReply:
    edit = {"path": arguments["file_path"], "old": arguments["old_string"], "new": arguments["new_string"]}
    edit |= {"op": "replace", **({"count": "all"} if arguments.get("replace_all") else {})}
    (made,) = await (await call.session()).files.edit([edit])
    diff, _ = shorten(made.diff or "", max_chars=MAX_CHARS // 6)
    return ToolReply(f"{_line(diff)}[{made.path}: {made.replacements} replaced]")


async def _apply_patch(call: ToolCall, arguments: Arguments) -> ToolReply:
    try:
        edits = _edits_of(arguments["input"])
    except ValueError as error:
        return ToolReply(str(error), is_error=True)
    made = await (await call.session()).files.edit(edits)
    return ToolReply("\n".join(f"[{each.path}: done]" for each in made))


_FILES_OF_PATCH = {"*** Add File: ": "create", "*** Delete File: ": "delete", "*** Update File: ": "patch"}


def _edits_of(patch: str) -> list[dict[str, Any]]:  # JSON values
    """Return a patch of several files (`*** Begin Patch`) as edits, one for each file. Raises `ValueError`."""
    lines = patch.strip("\n").split("\n")
    if lines[0].strip() != "*** Begin Patch" or lines[-1].strip() != "*** End Patch":
        raise ValueError("a patch begins with the line `*** Begin Patch` and ends with `*** End Patch`")
    edits: list[dict[str, Any]] = []
    for line in lines[1:-1]:
        head = next((each for each in _FILES_OF_PATCH if line.startswith(each)), None)
        if head is not None:
            edits.append({"path": line.removeprefix(head).strip(), "op": _FILES_OF_PATCH[head], "lines": [line]})
        elif line.startswith("*** Move to: "):
            raise ValueError("files are moved by a command, not by a patch")
        elif not edits:
            raise ValueError("the patch names no file: `*** Add File: `, `*** Delete File: ` or `*** Update File: `")
        else:
            edits[-1]["lines"].append(line)
    for edit in edits:
        body = edit.pop("lines")
        if edit["op"] == "create":
            edit["text"] = "".join(f"{line.removeprefix('+')}\n" for line in body[1:])
        elif edit["op"] == "patch":
            edit["patch"] = "\n".join(["*** Begin Patch", *body, "*** End Patch", ""])
    return edits


async def _glob(call: ToolCall, arguments: Arguments) -> ToolReply:
    files = (await call.session()).files
    paths = await files.glob(arguments["pattern"], arguments.get("path") or "", limit=MAX_PATHS + 1)
    text, _ = shorten("\n".join(paths[:MAX_PATHS]) or "[no file]", "a narrower pattern shows it")
    return ToolReply(text + (f"\n[more than {MAX_PATHS}: a narrower pattern shows them]" if paths[MAX_PATHS:] else ""))


async def _grep(call: ToolCall, arguments: Arguments) -> ToolReply:
    found = await (await call.session()).files.search(
        arguments["pattern"],
        arguments.get("path") or "",
        regex=True,
        glob=arguments.get("glob"),
        max_matches=MAX_MATCHES,
    )
    text, _ = shorten("".join(f"{each.path}:{each.line}:{each.text}\n" for each in found.found))
    state = f"[{len(found.found)} in {found.files} of {found.searched} files"
    state += ", more left out" if found.truncated else ""
    state += ", out of time" if found.timed_out else ""
    return ToolReply(f"{text}{state}]")


# The sandbox ----------------------------------------------------------------------------------------------------------


async def _ports(call: ToolCall, arguments: Arguments) -> ToolReply:
    session = await call.session(may_make=False)
    wanted = arguments.get("wait_for")
    deadline = time.monotonic() + (arguments.get("timeout_ms") or 30_000) / 1000
    while True:
        ports = await session.ports()
        if wanted is None or any(each.port == wanted for each in ports):
            break
        if time.monotonic() >= deadline:
            return ToolReply(
                f"nothing listens on port {wanted} yet; look at the process with bash_output", is_error=True
            )
        await anyio.sleep(POLL_S)
    return ToolReply("\n".join(f"{each.address}:{each.port}" for each in ports) or "[nothing listens]")


async def _preview(call: ToolCall, arguments: Arguments) -> ToolReply:
    preview = await (await call.session(may_make=False)).preview(arguments["port"], keep_alive=True)
    return ToolReply(f"{preview.link}\n[until {preview.expires_at}; whoever has this link reaches port {preview.port}]")


async def _sandboxes(call: ToolCall, arguments: Arguments) -> ToolReply:
    name = call.sandbox
    match arguments["action"]:
        case "create":
            await call.sandboxes.make(name, arguments.get("image"))
            return ToolReply(f"[{name} is there]")
        case "list":
            found = await call.sandboxes.all()
            rows = [
                f"{each}: {info.status}, image {info.image}, made {info.created_at}" for each, info in found.items()
            ]
            return ToolReply("\n".join(rows) or "[no sandbox; the first command makes one]")
        case action:
            info = await call.sandboxes.find(name)
            if info is None:
                return ToolReply(f"there is no sandbox {name!r}", is_error=True)
            session = Session(call.sandboxes.client, info.id)
            if action == "end":
                await session.destroy()
                call.sandboxes.forget(name)
                return ToolReply(f"[{name} has ended]")
            stats = await session.stats()
            used = f"memory {words_of_size(stats.memory_bytes)} of {words_of_size(stats.memory_limit)}"
            limits = ", ".join(f"{key} {value}" for key, value in info.limits.items())
            return ToolReply(
                f"{name}: {info.status}, image {info.image}, ends {info.expires_at}, {used}; limits: {limits}"
            )


def _line(text: str) -> str:
    """Return a text that ends with a line break, or nothing."""
    return text if not text or text.endswith("\n") else text + "\n"


# The table ------------------------------------------------------------------------------------------------------------

_TEXT: Schema = {"type": "string"}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_PATH: Schema = {"type": "string", "minLength": 1}
_YES: Schema = {"type": "boolean"}
_INT: Schema = {"type": "integer", "minimum": 0}
_MS: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS}
_SANDBOX: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_RUN: Schema = {"type": "string", "minLength": 1, "maxLength": 128}


def _output(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


_ENDED: Mapping[str, Schema] = {
    "output": _TEXT,
    "exit_code": {"type": "integer"},
    "cause": _TEXT,
    "exec_id": _TEXT,
    "duration_ms": _INT,
    "truncated": _YES,
    "bytes_total": _INT,
    "is_running": _YES,
}

TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            "bash",
            "Run a command in the sandbox's persistent shell: cd, variables, functions stay. background: start it and "
            "return its exec_id. restart: begin a fresh shell. shell: the name of another shell, beside the first.",
            {"command": _TEXT, "timeout_ms": _MS, "restart": _YES, "background": _YES, "shell": _RUN},
            _bash,
            is_open=True,
            output=_output("output", **_ENDED, cwd=_TEXT),
        ),
        Tool(
            "bash_output",
            "Read the output of a run from a byte offset; wait_ms waits for more of it.",
            {"exec_id": _RUN, "offset": _INT, "wait_ms": _MS},
            _bash_output,
            required=("exec_id",),
            reads=True,
            output=_output("output", **_ENDED, next_offset=_INT),
        ),
        Tool(
            "write_stdin",
            "Type text into a background run; close ends its input.",
            {"exec_id": _RUN, "text": _TEXT, "close": _YES},
            _write_stdin,
            required=("exec_id",),
            is_open=True,
        ),
        Tool("kill", "End a run and all that it started.", {"exec_id": _RUN}, _kill, required=("exec_id",)),
        Tool(
            "read",
            "Read a text file with line numbers, an image or a directory. view_range: first and last line, -1=end.",
            {
                "file_path": _PATH,
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": -1},
                    "minItems": 2,
                    "maxItems": 2,
                },
            },
            _read,
            required=("file_path",),
            reads=True,
        ),
        Tool(
            "write",
            "Write a file, replacing one that is there; directories are made.",
            {"file_path": _PATH, "content": _TEXT},
            _write,
            required=("file_path", "content"),
        ),
        Tool(
            "edit",
            "Replace old_string, which must be in the file exactly once, unless replace_all.",
            {"file_path": _PATH, "old_string": _PATH, "new_string": _TEXT, "replace_all": _YES},
            _edit,
            required=("file_path", "old_string", "new_string"),
        ),
        Tool(
            "apply_patch",
            "Change files by a patch between `*** Begin Patch` and `*** End Patch`, all or none.",
            {"input": _PATH},
            _apply_patch,
            required=("input",),
            is_default=False,
        ),
        Tool(
            "glob",
            "Find files by a pattern: *, **, ?, [a-z], {a,b}.",
            {"pattern": _PATH, "path": _TEXT},
            _glob,
            required=("pattern",),
            reads=True,
        ),
        Tool(
            "grep",
            "Search the contents of files for a regular expression. glob chooses the files.",
            {"pattern": _PATH, "path": _TEXT, "glob": _TEXT},
            _grep,
            required=("pattern",),
            reads=True,
        ),
        Tool(
            "ports",
            "List the TCP ports that listen in the sandbox, or wait for one.",
            {"wait_for": _PORT, "timeout_ms": _MS},
            _ports,
            reads=True,
        ),
        Tool(
            "preview",
            "Return a link by which a person's browser reaches the server on a port of the sandbox, for an hour.",
            {"port": _PORT},
            _preview,
            required=("port",),
            is_additive=True,
        ),
        Tool(
            "sandboxes",
            "List sandboxes; create, end or describe the one named by `sandbox`, by which any tool chooses another.",
            {"action": {"enum": ["list", "create", "end", "info"]}, "image": _TEXT},
            _sandboxes,
            required=("action",),
        ),
    )
}


def chosen(names: Sequence[str] | None, *, may_write: bool = True) -> list[Tool]:
    """Return the tools that a client gets: those named, or the default ones; without `may_write` those that only read.

    Raises:
        ValueError: there is no tool of a name.
    """
    if unknown := [name for name in names or () if name not in TOOLS]:
        raise ValueError(f"there is no tool {unknown[0]!r}; there are {', '.join(TOOLS)}")
    wanted = [tool for tool in TOOLS.values() if (tool.name in names if names else tool.is_default)]
    return [tool for tool in wanted if may_write or tool.reads]
