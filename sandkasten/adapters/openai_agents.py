"""Sandboxes for the OpenAI Agents SDK: the client of a `SandboxAgent`, and executors for the hosted tools.

`SandkastenSandboxClient` goes into `RunConfig(sandbox=SandboxRunConfig(client=...))`: the framework then makes, resumes
and ends sessions, and gives its model a shell and file tools in them. `shell_tool` and `apply_patch_tool` are for an
ordinary `Agent` whose model has OpenAI's hosted tools, over a session of the caller's.
"""

from __future__ import annotations

import asyncio
import io
import math
import posixpath
import shlex
import tarfile
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import urlsplit

from agents import (
    ApplyPatchTool,
    ShellCallOutcome,
    ShellCommandOutput,
    ShellCommandRequest,
    ShellResult,
    ShellTool,
    apply_diff,
)
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from agents.sandbox.errors import (
    ExecNonZeroError,
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
)
from agents.sandbox.files import EntryKind, FileEntry
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
    truncate_text_by_tokens,
)
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, Permissions, User
from agents.sandbox.workspace_paths import coerce_posix_path, posix_path_as_path, sandbox_path_str

from sandkasten import errors
from sandkasten.sdk import Run, SandboxClient, Session
from sandkasten.sdk.types import UNSET, ExecBytes, FileInfo, Preview

MAX_OUTPUT_BYTES = 32 * 1024 * 1024
"""Bytes of each output stream of a command that are handed to the framework."""
MAX_WINDOW_CHARS = 1024 * 1024
"""Characters of an interactive command that one call returns; the rest comes with the next call."""
_SPOOL_BYTES = 16 * 1024 * 1024
_PTY_SIZE = (120, 30)
_EXPOSED_S = 86_400
_MAX_LINKS = 40
"""Links in a row that the kernel follows (path_resolution(7))."""
_ROOTS_TOOLS = ("useradd", "usermod", "groupadd", "chgrp")
"""Programs by which the framework makes a manifest's accounts: only root may run them."""
_KINDS = {"file": EntryKind.FILE, "directory": EntryKind.DIRECTORY, "symlink": EntryKind.SYMLINK}


class SandkastenSandboxClientOptions(BaseSandboxClientOptions):
    """Settings of new sessions; docs/api.md#sessions explains the fields, and None is the server's default.

    `on_exit` says what becomes of the session at the end of the run: `end` ends it, `pause` freezes its processes and
    stops its lease until it is used again, `keep` leaves it as it is, to its lease. `resolve_exposed_port` tells where
    one of `exposed_ports` is reached.
    """

    type: Literal["sandkasten"] = "sandkasten"
    image: str = "python"
    workspace_id: str | None = None
    env: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    limits: dict[str, float] | None = None
    network: dict[str, Any] | None = None
    user: str | None = None
    idle_timeout_seconds: float | None = None
    on_exit: Literal["end", "pause", "keep"] = "end"
    exposed_ports: tuple[int, ...] = ()


class SandkastenSandboxSessionState(SandboxSessionState):
    """State by which the session is found again, or another like it is made. Holds no API key."""

    type: Literal["sandkasten"] = "sandkasten"
    sandbox_id: str
    options: SandkastenSandboxClientOptions


@dataclass
class _Interactive:
    """A command that goes on between calls. `rest` is output that was read and not handed out."""

    run: Run
    tty: bool
    rest: str = ""
    used_at: float = field(default_factory=time.monotonic)


class SandkastenSandboxSession(BaseSandboxSession):
    """A session as the framework uses it. Commands are programs beside the session's shells, so they run in parallel.

    Errors are those of `agents.sandbox.errors`; `retryable` is the server's word.
    """

    state: SandkastenSandboxSessionState

    def __init__(self, state: SandkastenSandboxSessionState, client: SandboxClient, box: Session) -> None:
        """Internal: use `SandkastenSandboxClient`. `client` is this session's own, and closed at its end."""
        self.state = state
        self._client, self._box = client, box
        self._interactive: dict[int, _Interactive] = {}
        self._endpoints: dict[int, ExposedPortEndpoint] = {}
        self._opening = asyncio.Lock()
        self._is_root_plain = False

    # Life -------------------------------------------------------------------------------------------------------------

    async def _prepare_backend_workspace(self) -> None:
        root = posixpath.normpath(self.state.manifest.root)
        self._is_root_plain = await self._box.files.mkdir(root) == root

    def _wrap_start_error(self, error: Exception) -> Exception:
        if not isinstance(error, errors.SandkastenError):
            return error
        return _start_error(self.state.manifest, error)

    async def running(self) -> bool:
        """Return whether the session lives and its server answers."""
        try:
            return (await self._box.info()).is_live
        except errors.SandkastenError:
            return False

    async def _shutdown_backend(self) -> None:
        try:
            match self.state.options.on_exit:
                case "end":
                    async with self._box:  # ends it, also for a caller that is cancelled meanwhile
                        pass
                case "pause":
                    await self._box.pause(stop_lease=True)
        except (errors.SessionNotFound, errors.SessionExpired):
            pass  # it has ended by itself
        finally:
            await self._client.close()

    def _current_runtime_helper_cache_key(self) -> object | None:
        return self.state.sandbox_id

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        """Return the path if it is within the workspace or what was granted, also when its links are followed."""
        if not self._is_root_plain:
            return await self._validate_remote_path_access(path, for_write=for_write)
        policy = self._workspace_path_policy()
        place = policy.normalize_sandbox_path(path, for_write=for_write)
        try:
            real = await self._real(PurePosixPath(place))
        except errors.SandkastenError as error:
            raise ExecTransportError(command=("stat", str(place)), cause=error, retryable=error.retryable) from error
        policy.normalize_sandbox_path(real, for_write=for_write)
        return posix_path_as_path(place)

    async def _real(self, path: PurePosixPath, links: int = 0) -> PurePosixPath:
        """Return a path without links; of one that does not exist, the place where it would be."""
        try:
            found = await self._box.files.stat(str(path), follow=True)
        except (errors.FileNotFound, errors.NotADirectory):
            return await self._real(path.parent, links) / path.name
        if found.target is None or links > _MAX_LINKS:
            return PurePosixPath(found.path)
        there = posixpath.join(posixpath.dirname(found.path), found.target)  # of a link that leads to nothing
        return await self._real(PurePosixPath(posixpath.normpath(there)), links + 1)

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        """Return where a port is reached: by a preview, whose token is in the query, or where the node has none by a
        published port. It is opened at the first call, for a day."""
        async with self._opening:  # a second preview of a port voids the token of the first
            if port not in self._endpoints:
                try:
                    place = urlsplit((await self._open(port)).link)
                except errors.SandkastenError as error:
                    raise ExposedPortUnavailableError(
                        port=port,
                        exposed_ports=self.state.exposed_ports,
                        reason="backend_unavailable",
                        context={"backend": "sandkasten", "error_code": error.code, "message": error.message},
                        cause=error,
                        retryable=error.retryable,
                    ) from error
                is_tls = place.scheme == "https"
                self._endpoints[port] = ExposedPortEndpoint(
                    place.hostname or "", place.port or (443 if is_tls else 80), tls=is_tls, query=place.query
                )
            return self._endpoints[port]

    async def _open(self, port: int) -> Preview:
        try:
            return await self._box.preview(port, ttl_seconds=_EXPOSED_S)
        except errors.PreviewsOff:
            return await self._box.preview(port, ttl_seconds=_EXPOSED_S, access="local")

    # Commands ---------------------------------------------------------------------------------------------------------

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        """Run a command as `user`, who needs no sudo in the image. Otherwise as the base class."""
        prepared = self._prepare_exec_command(*command, shell=shell, user=None)
        return await self._run(prepared, timeout, _name(user))

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self._run([str(each) for each in command], timeout, None)

    async def _exec_checked_nonzero(self, *command: str | Path) -> ExecResult:
        result = await self.exec(*command, shell=False, user="root" if command[0] in _ROOTS_TOOLS else None)
        if not result.ok():
            raise ExecNonZeroError(result, command=command)
        return result

    async def _run(self, command: Sequence[str], timeout: float | None, user: str | None) -> ExecResult:
        with _transport_errors(command):
            result = await self._box.exec_bytes(
                command,
                timeout_ms=_milliseconds(timeout),
                cwd=self.state.manifest.root,
                env=await self.state.manifest.environment.resolve() or None,
                user=user,
                on_timeout="result",
            )
            if result.timed_out:
                raise ExecTimeoutError(command=command, timeout_s=timeout, context=_said(result))
            if result.truncated:
                await self._complete(result)
        if (left_out := result.bytes_total - len(result.stdout) - len(result.stderr)) > 0:
            result.stderr += b"\n[%d bytes of output left out]\n" % left_out
        if result.cause not in ("exited", "signalled"):
            result.stderr += f"\n[{result.cause}]\n".encode()
        return ExecResult(stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code)

    async def _complete(self, result: ExecBytes) -> None:
        """Replace output that the server's answer has in part by the kept one, if that is there."""
        run = self._box.run(result.exec_id)
        try:
            stdout = await run.kept_output("stdout", max_bytes=MAX_OUTPUT_BYTES)
            result.stdout, result.stderr = stdout, await run.kept_output("stderr", max_bytes=MAX_OUTPUT_BYTES)
        except (errors.ExecGone, errors.ExecNotFound):
            pass

    # Interactive commands ---------------------------------------------------------------------------------------------

    def supports_pty(self) -> bool:
        """Return true: commands may go on between calls, with or without a terminal."""
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Start a command, which has no time limit, and return what it writes within `yield_time_s`.

        `timeout` bounds the start. Without `tty` the command's input is empty.
        """
        prepared = self._prepare_exec_command(*command, shell=shell, user=None)
        with _transport_errors(prepared):
            try:
                async with asyncio.timeout(timeout):
                    run = await self._box.process(
                        prepared,
                        cwd=self.state.manifest.root,
                        env=await self.state.manifest.environment.resolve() or None,
                        user=_name(user),
                        tty=_PTY_SIZE if tty else None,
                        merged=True,
                        keep_alive=True,
                    )
            except TimeoutError as error:
                raise ExecTimeoutError(command=prepared, timeout_s=timeout, cause=error) from error
            number = allocate_pty_process_id(set(self._interactive))
            entry = self._interactive[number] = _Interactive(run, tty)
            if not tty:
                await _unless_ended(run.close_input())
            await self._prune()
            window_ms = 10_000 if yield_time_s is None else int(yield_time_s * 1000)
            return await self._collect(number, entry, clamp_pty_yield_time_ms(window_ms), max_output_tokens)

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Type into a command with a terminal, or only wait, and return what it writes within `yield_time_s`."""
        entry = self._resolve_pty_session_entry(pty_processes=self._interactive, session_id=session_id)
        if chars and not entry.tty:
            raise RuntimeError("stdin is not available for this process")  # the words that the framework looks for
        with _transport_errors(["write_stdin"]):
            if chars:
                await _unless_ended(entry.run.send(chars))
            window_ms = 250 if yield_time_s is None else int(yield_time_s * 1000)
            window_ms = resolve_pty_write_yield_time_ms(yield_time_ms=window_ms, input_empty=chars == "")
            return await self._collect(session_id, entry, window_ms, max_output_tokens)

    async def _collect(
        self, number: int, entry: _Interactive, window_ms: int, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        """Read output until the window closes, the command ends, or there is much; a cancelled call loses none."""
        try:
            async with asyncio.timeout(window_ms / 1000):
                while len(entry.rest) < MAX_WINDOW_CHARS:
                    entry.rest += str((await anext(entry.run)).data)
        except (TimeoutError, StopAsyncIteration):
            pass
        finally:
            await entry.run.aclose()  # unread output would hold up the command
        end = entry.run.end
        if end is not None:
            self._interactive.pop(number, None)
        text, entry.rest = entry.rest, ""
        entry.used_at = time.monotonic()
        shown, count = truncate_text_by_tokens(text, max_output_tokens)
        return PtyExecUpdate(
            process_id=number if end is None else None,
            output=shown.encode("utf-8", "replace"),
            exit_code=None if end is None else end.exit_code,
            original_token_count=count,
        )

    async def _prune(self) -> None:
        while len(self._interactive) > PTY_PROCESSES_MAX:
            meta = [(number, each.used_at, each.run.end is not None) for number, each in self._interactive.items()]
            number = process_id_to_prune_from_meta(meta)
            assert number is not None, "there are more than are protected"
            await _end(self._interactive.pop(number).run)

    async def pty_terminate_all(self) -> None:
        """End all commands that `pty_exec_start` began."""
        while self._interactive:
            _, entry = self._interactive.popitem()
            await _end(entry.run)

    # Files ------------------------------------------------------------------------------------------------------------

    async def read(self, path: Path | str, *, user: str | User | None = None) -> io.IOBase:
        """Return the content of a file, in memory or, if it is large, in a temporary file."""
        with _read_errors(path):
            place = sandbox_path_str(await self._validate_path_access(path))
            async with self._box.files.open(place, user=_name(user)) as stream:
                return await _spooled(stream)

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        place = sandbox_path_str(await self._validate_path_access(path))
        with _read_errors(path):
            try:
                return await self._box.files.read_bytes(place, length=max_bytes)
            except errors.RangeNotSatisfiable:
                return b""  # the file is empty

    async def write(self, path: Path | str, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Write a file, replaced in one step; missing directories are made."""
        place = await self._validate_path_access(path, for_write=True)
        content = cast("BinaryIO", coerce_write_payload(path=place, data=data).stream)
        with _write_errors(place):
            await self._box.files.write(sandbox_path_str(place), content, user=_name(user))

    async def mkdir(self, path: Path | str, *, parents: bool = False, user: str | User | None = None) -> None:
        """Make a directory."""
        place = sandbox_path_str(await self._validate_path_access(path, for_write=True))
        with _exec_errors("mkdir", place):
            await self._box.files.mkdir(place, parents=parents, user=_name(user))

    async def ls(self, path: Path | str, *, user: str | User | None = None) -> list[FileEntry]:
        """List a directory, or describe a file."""
        place = sandbox_path_str(await self._validate_path_access(path))
        with _exec_errors("ls", place):
            try:
                return [_entry(each) for each in await self._box.files.list(place, user=_name(user))]
            except errors.NotADirectory:
                return [_entry(await self._box.files.stat(place, user=_name(user)))]

    async def persist_workspace(self) -> io.IOBase:
        """Return the workspace as a tar archive, without what the manifest calls ephemeral."""
        root = self._workspace_root_path()
        with _read_errors(root):
            async with self._box.files.archive(sandbox_path_str(root)) as stream:
                archive = await _spooled(stream)
        if not (skipped := self._persist_workspace_skip_relpaths()):
            return archive
        with archive:
            return await asyncio.to_thread(_without, archive, {PurePosixPath(each.as_posix()) for each in skipped})

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Unpack a tar archive in the workspace; the server keeps its names within."""
        root = self._workspace_root_path()
        content = cast("BinaryIO", coerce_write_payload(path=root, data=data).stream)
        with _write_errors(root):
            await self._box.files.unpack(content, sandbox_path_str(root))


class SandkastenSandboxClient(BaseSandboxClient[SandkastenSandboxClientOptions]):
    """Client for `SandboxRunConfig(client=...)`. Every session has connections of its own, closed at its end.

    `base_url` and `api_key` default to `SANDKASTEN_URL` and `SANDKASTEN_API_KEY`. `timeout` is that of
    `sandkasten.SandboxClient`, in seconds.
    """

    backend_id = "sandkasten"
    supports_default_options = True

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 120.0,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        """Make a client; nothing is connected yet."""
        self._base_url, self._api_key, self._timeout = base_url, api_key, timeout
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies

    async def _connect(self) -> SandboxClient:
        if self._base_url is None:
            return await asyncio.to_thread(SandboxClient.from_env, timeout=self._timeout)
        return SandboxClient(base_url=self._base_url, api_key=self._api_key, timeout=self._timeout)

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: SandkastenSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """Make a session. Raises `WorkspaceStartError` if the server refuses."""
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        chosen = options or SandkastenSandboxClientOptions()
        session_id = uuid.uuid4()
        chosen_snapshot = resolve_snapshot(snapshot, str(session_id))  # first: it may fail
        client = await self._connect()
        box = await _make(client, chosen, manifest)
        state = SandkastenSandboxSessionState(
            session_id=session_id,
            manifest=manifest,
            snapshot=chosen_snapshot,
            sandbox_id=box.id,
            options=chosen,
            exposed_ports=chosen.exposed_ports,
        )
        inner = SandkastenSandboxSession(state, client, box)
        return self._wrap_session(inner, instrumentation=self._instrumentation)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Return the session of a state, if it still lives, else a new one like it.

        A new one gets its files from the state's snapshot, or else from its manifest, when it starts.
        """
        if not isinstance(state, SandkastenSandboxSessionState):
            raise TypeError("SandkastenSandboxClient.resume expects a SandkastenSandboxSessionState")
        state.assert_path_grants_rebound()
        client = await self._connect()
        try:
            box = await client.get_session(state.sandbox_id)
            is_live = (await box.info()).is_live
        except (errors.SessionNotFound, errors.SessionExpired):
            is_live = False
        except BaseException as error:
            await client.close()
            if isinstance(error, errors.SandkastenError):
                raise _start_error(state.manifest, error) from error
            raise
        if not is_live:
            box = await _make(client, state.options, state.manifest)
            state.sandbox_id = box.id
            state.workspace_root_ready = False
        inner = SandkastenSandboxSession(state, client, box)
        inner._set_start_state_preserved(is_live)
        return self._wrap_session(inner, instrumentation=self._instrumentation)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """End the session, unless its options say `pause` or `keep`."""
        if not isinstance(session._inner, SandkastenSandboxSession):
            raise TypeError("SandkastenSandboxClient.delete expects a session of its own")
        await session._inner.shutdown()
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        """Return a state that `serialize_session_state` wrote."""
        return self._deserialize_session_state_payload(payload, SandkastenSandboxSessionState)


async def _make(client: SandboxClient, options: SandkastenSandboxClientOptions, manifest: Manifest) -> Session:
    idle_s = options.idle_timeout_seconds
    try:
        return await client.create_session(
            image=options.image,
            workspace_id=options.workspace_id,
            env=options.env,
            labels=options.labels,
            limits=options.limits,
            network=options.network,
            user=options.user,
            idle_timeout_seconds=UNSET if idle_s is None else idle_s,
        )
    except BaseException as error:
        await client.close()
        if isinstance(error, errors.SandkastenError):
            raise _start_error(manifest, error) from error
        raise


# Hosted tools ---------------------------------------------------------------------------------------------------------


def shell_tool(session: Session, **options: Any) -> ShellTool:  # fields of ShellTool
    """Return OpenAI's hosted shell tool over a session's persistent shell, where directory and variables stay.

    A command without a time limit of the model's has the server's. `options` are those of `ShellTool`, such as
    `needs_approval`.
    """

    async def execute(request: ShellCommandRequest) -> ShellResult:
        action = request.data.action
        outputs = []
        for command in action.commands:
            result = await session.exec_bytes(command, timeout_ms=action.timeout_ms or 0, on_timeout="result")
            ended = ShellCallOutcome("timeout") if result.timed_out else ShellCallOutcome("exit", result.exit_code)
            texts = [each.decode("utf-8", "replace") for each in (result.stdout, result.stderr)]
            outputs.append(ShellCommandOutput(*texts, outcome=ended, command=command))
        return ShellResult(outputs, max_output_length=action.max_output_length)

    return ShellTool(executor=execute, **options)


def apply_patch_tool(session: Session, **options: Any) -> ApplyPatchTool:  # fields of ApplyPatchTool
    """Return OpenAI's hosted patch tool over a session's files. `options` are those of `ApplyPatchTool`."""
    return ApplyPatchTool(editor=SandkastenEditor(session), **options)


class SandkastenEditor:
    """Editor of `ApplyPatchTool`: each operation is made whole, or refused with a reason for the model."""

    def __init__(self, session: Session) -> None:
        """Edit files of a session; relative paths begin at `/workspace`."""
        self._files = session.files

    async def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Make a file; one that is there is not overwritten."""
        with _failures() as failed:
            await self._files.write(operation.path, apply_diff("", operation.diff or "", mode="create"), new=True)
        return failed or ApplyPatchResult("completed", f"Created {operation.path}")

    async def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Change a file, and give it another name if the operation says so."""
        with _failures() as failed:
            async with self._files.open(operation.path) as stream:
                version = stream.etag
                text = b"".join([piece async for piece in stream]).decode("utf-8")
            changed = apply_diff(text, operation.diff or "")
            if operation.move_to and operation.move_to != operation.path:
                mode = int((await self._files.stat(operation.path, follow=True)).mode, 8)
                made = {"path": operation.move_to, "op": "create", "text": changed}
                await self._files.edit([made, {"path": operation.path, "op": "delete", "if_match": version}])
                await self._files.chmod(operation.move_to, mode)
            else:
                await self._files.write(operation.path, changed, if_match=version)
        return failed or ApplyPatchResult("completed", f"Updated {operation.path}")

    async def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Remove a file."""
        with _failures() as failed:
            await self._files.remove(operation.path)
        return failed or ApplyPatchResult("completed", f"Deleted {operation.path}")


class _Failure(ApplyPatchResult):
    """Result of an operation that failed; false while it has not."""

    def __bool__(self) -> bool:
        return self.status is not None


@contextmanager
def _failures() -> Iterator[_Failure]:
    failed = _Failure()
    try:
        yield failed
    except (errors.SandkastenError, ValueError) as error:  # ValueError: of a diff, or of bytes that are no text
        failed.status, failed.output = "failed", str(error)


# Helpers --------------------------------------------------------------------------------------------------------------


def _name(user: str | User | None) -> str | None:
    return user.name if isinstance(user, User) else user


def _milliseconds(timeout: float | None) -> int:
    """Return a time limit in ms; 0 is the server's."""
    return 0 if timeout is None else max(math.ceil(timeout * 1000), 1)


def _said(result: ExecBytes) -> dict[str, object]:
    return {name: getattr(result, name)[-4096:].decode("utf-8", "replace") for name in ("stdout", "stderr")}


def _entry(info: FileInfo) -> FileEntry:
    permissions = Permissions.from_mode(int(info.mode, 8))
    permissions.directory = info.is_dir
    return FileEntry(
        path=info.path,
        permissions=permissions,
        owner=info.user or str(info.uid),
        group=info.group or str(info.gid),
        size=info.size,
        kind=_KINDS.get(info.type, EntryKind.OTHER),
    )


async def _unless_ended(order: Any) -> None:  # a coroutine
    try:
        await order
    except (errors.ExecEnded, errors.ExecGone):
        pass


async def _end(run: Run) -> None:
    try:
        await run.cancel()
    except errors.SandkastenError:
        pass  # it has ended, or will with its session


async def _spooled(pieces: AsyncIterator[bytes]) -> io.IOBase:
    spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 - the caller closes it
    try:
        async for piece in pieces:
            await asyncio.to_thread(spool.write, piece)
        spool.seek(0)
    except BaseException:
        spool.close()
        raise
    return spool


def _without(archive: io.IOBase, skipped: set[PurePosixPath]) -> io.IOBase:
    """Return a tar archive without the members below some paths."""
    kept = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 - the caller closes it
    with (
        tarfile.open(fileobj=cast("BinaryIO", archive), mode="r:") as source,
        tarfile.open(fileobj=kept, mode="w:", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            path = PurePosixPath(posixpath.normpath(member.name))
            if skipped.isdisjoint({path, *path.parents}):
                target.addfile(member, source.extractfile(member) if member.isreg() else None)
    kept.seek(0)
    return kept


def _start_error(manifest: Manifest, error: errors.SandkastenError) -> WorkspaceStartError:
    root = posix_path_as_path(coerce_posix_path(manifest.root))
    return WorkspaceStartError(path=root, cause=error, message=str(error), retryable=error.retryable)


@contextmanager
def _transport_errors(command: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except errors.SandkastenError as error:
        message = f"{shlex.join(command)[:200]}: {error}"
        context = {"error_code": error.code}
        raise ExecTransportError(
            command=command, context=context, cause=error, message=message, retryable=error.retryable
        ) from error


@contextmanager
def _exec_errors(*command: str) -> Iterator[None]:
    """Turn refusals of file requests into what the shell command that they stand for would give."""
    try:
        yield
    except errors.ClientError as error:
        raise ExecNonZeroError(
            ExecResult(stdout=b"", stderr=str(error).encode(), exit_code=1), command=command, cause=error
        ) from error
    except errors.SandkastenError as error:
        raise ExecTransportError(command=command, cause=error, retryable=error.retryable) from error


@contextmanager
def _read_errors(path: Path | str) -> Iterator[None]:
    place = posix_path_as_path(coerce_posix_path(path))
    try:
        yield
    except errors.FileNotFound as error:
        raise WorkspaceReadNotFoundError(path=place, cause=error) from error
    except errors.SandkastenError as error:
        context = {"error_code": error.code, "detail": str(error)}
        raise WorkspaceArchiveReadError(path=place, context=context, cause=error, retryable=error.retryable) from error


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except errors.SandkastenError as error:
        context = {"error_code": error.code, "detail": str(error)}
        raise WorkspaceArchiveWriteError(path=path, context=context, cause=error, retryable=error.retryable) from error
