"""A supervisor in memory: sessions are records, commands follow a script, files are bytes. Knows no HTTP.

What a test wants to see (a command that was cancelled, a writer that was held up) is an event or a counter here.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import attrs
import trio

from sandkasten import errors
from sandkasten.lifecycle import ENDED, LIVE
from sandkasten.model import (
    Cause,
    ExecEnd,
    ExecResult,
    ExecSpec,
    FileHead,
    Limits,
    Output,
    Readiness,
    Session,
    SessionPatch,
    SessionSpec,
    SessionStats,
    Status,
    Stream,
    Usage,
)

ROOTS = ("/workspace", "/tmp", "/home/sandbox")
PIECE_BYTES = 64 * 1024
DEFAULT_TTL_S = 1800.0


@attrs.define
class Script:
    """How one command behaves: wait for `turn`, write `outputs`, `repeat` times, wait for `hold`, end (or raise)."""

    outputs: Sequence[tuple[Stream, bytes]] = ()
    exit_code: int = 0
    cause: Cause = Cause.EXITED
    signal: int | None = None
    cwd: str = "/workspace"
    repeat: int = 1
    omitted: int = 0
    turn: trio.Event | None = None
    hold: trio.Event | None = None
    refusal: errors.SandkastenError | None = None
    failure: BaseException | None = None


class Run:
    """One command that was opened. `cancelled` is set when its context was left before it ended."""

    def __init__(self, spec: ExecSpec, script: Script) -> None:
        self.spec = spec
        self.script = script
        self.exec_id = spec.exec_id or secrets.token_hex(8)
        self.is_ended = False
        self.pieces_taken = 0
        self.cancelled = trio.Event()

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Output:
        await trio.lowlevel.checkpoint()
        if self.pieces_taken < len(self.script.outputs) * self.script.repeat:
            stream, data = self.script.outputs[self.pieces_taken % len(self.script.outputs)]
            self.pieces_taken += 1
            return Output(stream, data, self.pieces_taken)
        if self.script.hold is not None:
            await self.script.hold.wait()
        if self.script.failure is not None:
            raise self.script.failure
        self.is_ended = True
        raise StopAsyncIteration

    async def wait_end(self) -> ExecEnd:
        async for _ in self:
            pass
        return ExecEnd(
            exec_id=self.exec_id,
            exit_code=self.script.exit_code,
            signal=self.script.signal,
            cause=self.script.cause,
            cwd=self.spec.cwd or self.script.cwd,
            duration_ms=7,
            timeout_ms=self.spec.timeout_ms or 0,
            shell_restarted=False,
            usage=Usage(),
        )

    async def cancel(self) -> None:
        self.cancelled.set()


class Reader:
    """A file of `size_bytes` that is never whole in memory unless it was written."""

    def __init__(self, head: FileHead, content: bytes | None) -> None:
        self.head = head
        self._content = content
        self._position = 0

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        start, self._position = self._position, min(self._position + PIECE_BYTES, self.head.size_bytes)
        if start == self._position:
            raise StopAsyncIteration
        return bytes(self._position - start) if self._content is None else self._content[start : self._position]


class Writer:
    def __init__(self, supervisor: FakeSupervisor, key: tuple[str, str]) -> None:
        self._supervisor = supervisor
        self._key = key
        self._content = bytearray()

    async def send(self, data: bytes) -> None:
        await self._supervisor.write_gate.wait()
        self._supervisor.bytes_written += len(data)
        if self._supervisor.is_keeping:
            self._content += data

    async def commit(self) -> str:
        await trio.lowlevel.checkpoint()
        self._supervisor.files[self._key] = bytes(self._content)
        return self._key[1]


class FakeSupervisor:
    """`Supervisor` over dictionaries. `scripts` maps commands to their behaviour; others succeed in silence."""

    node_id = "fake"

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.specs: list[SessionSpec] = []
        self.patches: list[SessionPatch] = []
        self.scripts: dict[str, Script] = {}
        self.runs: list[Run] = []
        self.run_opened = trio.Event()
        self.files: dict[tuple[str, str], bytes] = {}
        self.sizes: dict[str, int] = {}
        self.write_gate = trio.Event()
        self.write_gate.set()
        self.bytes_written = 0
        self.is_keeping = True
        self.readiness_checks = {"store": "ok", "zygote": "ok", "disk": "ok"}
        self.create_failure: Exception | None = None

    async def create(self, spec: SessionSpec) -> Session:
        await trio.lowlevel.checkpoint()
        if self.create_failure is not None:
            raise self.create_failure
        self.specs.append(spec)
        now = datetime.now(UTC)
        ttl_s = spec.ttl_s or DEFAULT_TTL_S
        session = Session(
            id=secrets.token_hex(12),
            image=spec.image or "python",
            status=Status.RUNNING,
            cwd="/workspace",
            created_at=now,
            expires_at=now + timedelta(seconds=ttl_s),
            last_activity=now,
            ttl_s=ttl_s,
            limits=spec.limits or Limits(),
            workspace_id=spec.workspace_id,
            labels=dict(spec.labels),
            timings_ms={"queue": 0.1, "clone 3": 2.5},
        )
        self.sessions[session.id] = session
        return session

    async def get(self, session_id: str) -> Session:
        await trio.lowlevel.checkpoint()
        try:
            return self.sessions[session_id]
        except KeyError:
            raise errors.SessionNotFound("no such session") from None

    async def list(self, *, status: Status | None = None, ended: bool = False, limit: int = 1000) -> Sequence[Session]:
        await trio.lowlevel.checkpoint()
        wanted = {status} if status else LIVE | (ENDED if ended else set())
        found = [session for session in reversed(self.sessions.values()) if session.status in wanted]
        return found[:limit]

    async def update(self, session_id: str, patch: SessionPatch) -> Session:
        session = await self._live(session_id)
        self.patches.append(patch)
        changes = {name: value for name, value in attrs.asdict(patch, recurse=False).items() if value is not None}
        self.sessions[session_id] = attrs.evolve(session, **changes)
        return self.sessions[session_id]

    async def destroy(self, session_id: str) -> Session:
        session = await self.get(session_id)
        if session.status in LIVE:
            session = self.end(session_id, Status.DESTROYED, "destroyed by request")
        return session

    def end(self, session_id: str, status: Status, reason: str) -> Session:
        """Let a session end as if by itself."""
        self.sessions[session_id] = attrs.evolve(self.sessions[session_id], status=status, reason=reason)
        return self.sessions[session_id]

    async def stats(self, session_id: str) -> SessionStats:
        await self._live(session_id)
        return SessionStats(
            memory_bytes=1024,
            memory_limit=2048,
            memory_peak_bytes=-1,
            cpu_usage_usec=99,
            cpu_throttled=0,
            pids=2,
            pids_limit=256,
            oom_kills=0,
        )

    @asynccontextmanager
    async def open_exec(self, session_id: str, spec: ExecSpec) -> AsyncIterator[Run]:
        await self._live(session_id)
        script = self.scripts.get(spec.command, Script())
        run = Run(spec, script)
        self.runs.append(run)
        self.run_opened.set()
        try:
            if script.turn is not None:
                await script.turn.wait()
            if script.refusal is not None:
                run.is_ended = True
                raise script.refusal
            yield run
        finally:
            if not run.is_ended:
                run.cancelled.set()

    async def exec(self, session_id: str, spec: ExecSpec) -> ExecResult:
        streams: dict[Stream, bytearray] = {kind: bytearray() for kind in Stream}
        merged = bytearray()
        async with self.open_exec(session_id, spec) as run:
            async for output in run:
                streams[output.stream] += output.data
                merged += output.data
            end = await run.wait_end()
        omitted = run.script.omitted
        return ExecResult(
            end=end,
            output=bytes(merged),
            stdout=bytes(streams[Stream.STDOUT]),
            stderr=bytes(streams[Stream.STDERR]),
            bytes_total=len(merged) + omitted,
            bytes_omitted=omitted,
        )

    @asynccontextmanager
    async def open_read(self, session_id: str, path: str, *, max_bytes: int) -> AsyncIterator[Reader]:
        await self._live(session_id)
        resolved = self._resolve(path)
        content = self.files.get((session_id, resolved))
        if content is None and resolved not in self.sizes:
            raise errors.FileNotFound(f"no such file: {resolved}", path=resolved)
        size = self.sizes[resolved] if content is None else len(content)
        yield Reader(FileHead(resolved, min(size, max_bytes), size > max_bytes), content)

    @asynccontextmanager
    async def open_write(self, session_id: str, path: str) -> AsyncIterator[Writer]:
        await self._live(session_id)
        yield Writer(self, (session_id, self._resolve(path)))

    async def readiness(self) -> Readiness:
        await trio.lowlevel.checkpoint()
        return Readiness(all(value == "ok" for value in self.readiness_checks.values()), self.readiness_checks)

    async def _live(self, session_id: str) -> Session:
        session = await self.get(session_id)
        if session.status not in LIVE:
            raise errors.SessionExpired("the session has ended", status=session.status.value, reason=session.reason)
        return session

    def _resolve(self, path: str) -> str:
        resolved = posixpath.normpath(posixpath.join("/workspace", path))
        if resolved in ROOTS:
            raise errors.IsADirectory(f"is a directory: {resolved}", path=resolved)
        if not resolved.startswith(tuple(f"{root}/" for root in ROOTS)):
            raise errors.PathOutside(f"outside of the allowed roots: {resolved}", path=resolved)
        return resolved
