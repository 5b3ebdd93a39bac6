"""Tools for the OpenAI Agents SDK, under the published client's names.

`sandkasten_tools()` are for an `Agent[SandkastenContext]`, `create_sandkasten_tools(session)` for any agent. Both need
the package `openai-agents`, which is imported when tools are made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_type_hints

from sandkasten.sdk.client import SandboxClient
from sandkasten.sdk.session import Session

__all__ = ["SandkastenContext", "create_sandkasten_tools", "sandbox_tools_for_workspace", "sandkasten_tools"]


@dataclass
class SandkastenContext:
    """Context of an agent's run: the session that the tools use, and the workspace of its user."""

    session: Session
    workspace_id: str | None = None


async def sandbox_exec(session: Session, cmd: str, timeout_ms: int = 30000) -> str:
    """Run a command in the sandbox's shell, which keeps its directory and variables, and return result and output."""
    result = await session.exec(cmd, timeout_ms=timeout_ms, on_timeout="result")
    return f"exit_code={result.exit_code}\ncwd={result.cwd}\n---\n{result.output}"


async def sandbox_write_file(session: Session, path: str, content: str) -> str:
    """Write a text file in the sandbox; the path is absolute, or relative to /workspace."""
    await session.write(path, content)
    return f"wrote {path}"


async def sandbox_read_file(session: Session, path: str, max_bytes: int | None = None) -> str:
    """Read a text file of the sandbox, at most max_bytes of it; the path is absolute, or relative to /workspace."""
    result = await session.read(path, max_bytes=max_bytes)
    return result.content.decode("utf-8", "replace") + ("\n(truncated)" if result.truncated else "")


async def sandbox_list_files(session: Session, path: str = ".") -> str:
    """List the files of a directory of the sandbox, one on a line: mode, size in bytes, time, and name."""
    entries = await session.files.list(path)
    return "\n".join(f"{each.mode} {each.size} {each.modified_at} {each.name}{'/' * each.is_dir}" for each in entries)


async def sandbox_stats(session: Session) -> str:
    """Tell how much memory and processor time the sandbox uses."""
    stats = await session.stats()
    return (
        f"memory_bytes={stats.memory_bytes}, memory_limit={stats.memory_limit}, cpu_usage_usec={stats.cpu_usage_usec}"
    )


_OPERATIONS: tuple[Callable[..., Awaitable[str]], ...] = (
    sandbox_exec,
    sandbox_write_file,
    sandbox_read_file,
    sandbox_list_files,
    sandbox_stats,
)


@functools.cache
def sandkasten_tools() -> list[Any]:  # tools of the Agents SDK
    """Return tools for an `Agent[SandkastenContext]`: `Runner.run(..., context=SandkastenContext(session))`.

    Raises:
        ImportError: `openai-agents` is not installed.
    """
    from agents import RunContextWrapper

    return [_tool(each, lambda context: context.context.session, RunContextWrapper[Any]) for each in _OPERATIONS]


def create_sandkasten_tools(session: Session) -> list[Any]:  # tools of the Agents SDK
    """Return tools that use a session, for an agent without a context. Errors as of `sandkasten_tools`."""
    return [_tool(each, lambda _: session, None) for each in _OPERATIONS]


def _tool(operation: Callable[..., Awaitable[str]], find: Callable[[Any], Session], context: Any) -> Any:
    """Return an operation as a tool, whose first parameter is the run's context, if there is one, and not the session.

    The Agents SDK reads the parameters' names and types from the signature and the annotations.
    """
    from agents import function_tool

    hints = get_type_hints(operation) | ({} if context is None else {"context": context})
    del hints["session"]
    _, *parameters = inspect.signature(operation).parameters.values()
    if context is not None:
        parameters.insert(0, inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD))
    parameters = [each.replace(annotation=hints[each.name]) for each in parameters]
    signature = inspect.Signature(parameters, return_annotation=str)

    async def run(*arguments: Any, **named: Any) -> str:  # those of the operation
        bound = signature.bind(*arguments, **named).arguments
        return await operation(find(bound.pop("context", None)), **bound)

    run.__name__, run.__doc__, run.__annotations__ = operation.__name__, operation.__doc__, hints
    run.__signature__ = signature  # type: ignore[attr-defined]  # inspect.signature looks for it
    return function_tool(run)


@asynccontextmanager
async def sandbox_tools_for_workspace(
    client: SandboxClient, workspace_id: str, *, image: str = "python", ttl_seconds: int | None = None
) -> AsyncIterator[tuple[Session, list[Any]]]:
    """Make a session in a workspace, yield it with its tools, and end it."""
    async with await client.create_session(image=image, ttl_seconds=ttl_seconds, workspace_id=workspace_id) as session:
        yield session, create_sandkasten_tools(session)
