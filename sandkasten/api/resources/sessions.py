"""Sessions: create, read, list, change, pause and destroy; the classes of their requests and answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal, NewType

import attrs

from sandkasten.api.http.errors import Answer, json_answer, json_list_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body, to_plain
from sandkasten.api.http.key_scope import owned_patch, owned_query, owned_spec, within_reach
from sandkasten.api.resources.fields import (
    Account,
    Cores,
    DiskInodes,
    DiskMegabytes,
    ExecMode,
    Fixed,
    IdleTimeout,
    LabelFilter,
    Labels,
    Lifetime,
    ListLimit,
    MemoryInodes,
    MemoryMegabytes,
    OpenFiles,
    Pids,
    Places,
    SeccompName,
    Shell,
    ShmMegabytes,
    StatusFilter,
    StopGrace,
    TmpMegabytes,
    Token,
    Ttl,
    User,
    WorkspaceId,
    WorkspaceModeName,
    add_kinds,
    bad_fields,
    member_of,
    read_head,
    read_query,
    read_request,
)
from sandkasten.api.resources.network import (
    NetworkBody,
    NetworkChange,
    NetworkRequest,
    PublishRequest,
    Revision,
    SessionEnvironment,
    SessionEnvironmentPatch,
    split_environment,
)
from sandkasten.errors import InvalidImage, InvalidRequest
from sandkasten.model import (
    FOREVER_S,
    IMAGE_REFERENCE,
    AtEnd,
    FileRules,
    Limits,
    Pause,
    PauseSpec,
    Session,
    SessionPatch,
    SessionSpec,
    SessionStats,
    Status,
    StreamsMode,
)
from sandkasten.model.lifecycle import ENDED, LIVE
from sandkasten.model.listing import LabelSelector, Place, SessionQuery, parse_cursor
from sandkasten.model.network import NetworkMode
from sandkasten.model.node import MissingPart, Part
from sandkasten.model.session import EndReason

DEFAULT_LIST = ListLimit(1000)
NEXT_CURSOR = "x-next-cursor"
"""Header with the `cursor` of the next page; absent on the last one."""

ListCursor = NewType("ListCursor", Place)
add_kinds({ListCursor: lambda value: parse_cursor(str(value)), AtEnd: member_of(AtEnd)})

_NOT_A_TOKEN = re.compile(r"[^A-Za-z0-9_.-]")

# Requests -------------------------------------------------------------------------------------------------------------

_NO_IDLE_TIMEOUT = IdleTimeout(0)
_NO_LIFETIME = Lifetime(0)
"""The defaults of fields that take null, too: null means no end, an absent field the configured value."""

_SAME = Fixed(None)


@attrs.frozen
class LimitsRequest:
    """Limits of a new session; the others are the configured ones. `aliases` are the names in configurations."""

    aliases: ClassVar[Mapping[str, str]] = {
        "cpu_quota": "cpu",
        "cpu_limit": "cpu",
        "mem_limit_mb": "memory_mb",
        "pids_limit": "pids",
        "disk_limit_mb": "disk_mb",
        "disk_inodes_limit": "disk_inodes",
        "open_files_limit": "open_files",
        "tmp_limit_mb": "tmp_mb",
        "shm_limit_mb": "shm_mb",
    }
    cpu: Cores | None = None
    memory_mb: MemoryMegabytes | None = None
    pids: Pids | None = None
    disk_mb: DiskMegabytes | None = None
    disk_inodes: DiskInodes | None = None
    open_files: OpenFiles | None = None
    tmp_mb: TmpMegabytes | None = None
    tmp_inodes: MemoryInodes | None = None
    shm_mb: ShmMegabytes | None = None
    shm_inodes: MemoryInodes | None = None

    def over(self, base: Limits) -> Limits:
        """Return `base` with the limits that were asked for."""
        asked = attrs.asdict(self, filter=lambda _attribute, value: value is not None)
        return attrs.evolve(base, **asked)


@attrs.frozen
class LimitsChange(LimitsRequest):
    """Limits of a live session; fields that are fixed when the session is made are refused."""

    open_files: Fixed = _SAME  # type: ignore[assignment]  # narrower: nothing is taken
    tmp_mb: Fixed = _SAME  # type: ignore[assignment]
    tmp_inodes: Fixed = _SAME  # type: ignore[assignment]
    shm_mb: Fixed = _SAME  # type: ignore[assignment]
    shm_inodes: Fixed = _SAME  # type: ignore[assignment]


@attrs.frozen
class FilesystemRequest:
    """Absolute paths that commands may read, and write."""

    readable: Places | None = None
    writable: Places | None = None

    @property
    def rules(self) -> FileRules | None:
        """The model's rules; None when nothing is restricted."""
        return None if self.readable is None and self.writable is None else FileRules(self.readable, self.writable)


@attrs.frozen
class CreateRequest:
    """A session to create."""

    image: str | None = None
    ttl_seconds: Ttl | None = None
    workspace_id: WorkspaceId | None = None
    workspace_mode: WorkspaceModeName | None = None
    idempotency_key: Token | None = None
    labels: Labels | None = None
    env: SessionEnvironment | None = attrs.field(default=None, repr=False)
    limits: LimitsRequest | None = None
    idle_timeout_seconds: IdleTimeout | None = _NO_IDLE_TIMEOUT
    max_lifetime_seconds: Lifetime | None = _NO_LIFETIME
    readonly_rootfs: bool | None = None
    shell: Shell | None = None
    network: NetworkRequest | None = None
    publish: Sequence[PublishRequest] = ()
    exec_mode: ExecMode | None = None
    user: User | None = None
    account: Account | None = None
    root_inside: bool | None = None
    filesystem: FilesystemRequest | None = None
    seccomp: SeccompName | None = None
    stop_grace_ms: StopGrace | None = None
    streams: StreamsMode | None = None
    at_end: AtEnd | None = None

    def to_spec(
        self, *, default_limits: Limits, key_header: str | None, default_network: NetworkMode = NetworkMode.NONE
    ) -> SessionSpec:
        """Return the model's spec.

        Raises:
            InvalidImage: the image's name is malformed.
            InvalidRequest: the idempotency keys of body and header differ, or two idle timeouts differ.
        """
        if self.image is not None and not IMAGE_REFERENCE.match(self.image):
            raise InvalidImage("the image name is malformed", image=self.image[:100])
        env, secret_env = split_environment(self.env or {})
        return SessionSpec(
            image=self.image,
            ttl_s=_one_timeout(self.ttl_seconds, self.idle_timeout_seconds),
            workspace_id=self.workspace_id,
            workspace_mode=self.workspace_mode,
            labels=self.labels or {},
            env=env,
            secret_env=secret_env,
            limits=None if self.limits is None else self.limits.over(default_limits),
            max_lifetime_s=_span(self.max_lifetime_seconds),
            readonly_rootfs=self.readonly_rootfs,
            shell=self.shell,
            exec_mode=self.exec_mode,
            user=self.user,
            account=self.account,
            root_inside=self.root_inside,
            filesystem=None if self.filesystem is None else self.filesystem.rules,
            seccomp=self.seccomp,
            stop_grace_ms=self.stop_grace_ms,
            streams=self.streams,
            at_end=self.at_end,
            network=None if self.network is None else self.network.over(default_network),
            publish=tuple(each.to_spec() for each in self.publish),
            idempotency_key=_one_key(self.idempotency_key, key_header),
        )


@attrs.frozen
class CreateHead:
    """The idempotency key of a create, which the body may have as well."""

    idempotency_key: Token | None = None


@attrs.frozen
class PatchRequest:
    """A change of a live session."""

    ttl_seconds: Ttl | None = None
    labels: Labels | None = None
    limits: LimitsChange | None = None
    env: SessionEnvironmentPatch | None = attrs.field(default=None, repr=False)
    network: NetworkChange | None = None
    if_revision: Revision | None = None
    idle_timeout_seconds: IdleTimeout | None = _NO_IDLE_TIMEOUT
    max_lifetime_seconds: Lifetime | None = _NO_LIFETIME

    def to_patch(self, *, current: Limits) -> SessionPatch:
        """Return the model's change; `current` fills the limits that a partial `limits` leaves out. Raises
        `InvalidRequest` if two idle timeouts differ."""
        env, secret_env = split_environment(self.env or {})
        return SessionPatch(
            ttl_s=_one_timeout(self.ttl_seconds, self.idle_timeout_seconds),
            max_lifetime_s=_span(self.max_lifetime_seconds),
            labels=self.labels,
            limits=None if self.limits is None else self.limits.over(current),
            env=env or None,
            secret_env=secret_env,
            network=None if self.network is None else self.network.over(NetworkMode.NONE),
            if_revision=self.if_revision,
        )


@attrs.frozen
class PauseRequest:
    """A pause; without `auto_resume: false` the next request ends it."""

    auto_resume: bool | None = None
    stop_lease: bool | None = None

    def to_spec(self) -> PauseSpec:
        """Return the model's spec."""
        return PauseSpec(auto_resume=self.auto_resume is not False, stop_lease=bool(self.stop_lease))


@attrs.frozen
class SessionsQuery:
    """The query of a list of sessions. `label` is `NAME` or `NAME=VALUE`, and may come more than once."""

    status: StatusFilter | None = None
    label: tuple[LabelFilter, ...] = ()
    limit: ListLimit = DEFAULT_LIST
    cursor: ListCursor | None = None

    def to_query(self) -> SessionQuery:
        """Return the model's query."""
        return SessionQuery(
            statuses=_statuses(self.status),
            labels=tuple(LabelSelector(*text.split("=", 1)) for text in self.label),
            after=self.cursor,
            limit=self.limit,
        )


def _one_timeout(ttl_seconds: int | None, idle_timeout_seconds: int | None) -> float | None:
    """Return the idle timeout. By its older name null and 0 both mean the configured value."""
    asked, span_s = float(ttl_seconds) if ttl_seconds else None, _span(idle_timeout_seconds)
    if asked is not None and span_s is not None and asked != span_s:
        raise bad_fields(idle_timeout_seconds="is the same as ttl_seconds, and differs from it")
    return span_s if asked is None else asked


def _span(seconds: int | None) -> float | None:
    """Return a span as the model has it: null is without end, 0 stands for an absent field."""
    if seconds is None:
        return FOREVER_S
    return float(seconds) if seconds else None


def _one_key(in_body: str | None, in_header: str | None) -> str | None:
    if None not in (in_body, in_header) and in_body != in_header:
        raise InvalidRequest("two different idempotency keys", idempotency_key="body and header differ")
    return in_body if in_body is not None else in_header


def _statuses(text: str | None) -> frozenset[Status]:
    if text is None:
        return LIVE
    return LIVE | ENDED if text == "all" else frozenset({Status(text)})


# Answers --------------------------------------------------------------------------------------------------------------


@attrs.frozen
class PublishedBody(Body):
    """A published port of a session, and the port of the node that leads to it."""

    port: int
    host_port: int


@attrs.frozen(kw_only=True)
class SessionBody(Body):
    """A session. Spans are in seconds, null without end."""

    id: str
    image: str
    status: Status
    cwd: str
    created_at: datetime
    expires_at: datetime | None
    last_activity: datetime
    acquire_source: str
    ttl_seconds: float | None
    idle_timeout_seconds: float | None
    max_lifetime_seconds: float | None
    limits: Limits
    exec_mode: str
    user: str | None
    account: str | None
    root_inside: bool
    filesystem: FileRules | None
    seccomp: str
    workspace_mode: str
    stop_grace_ms: int
    streams: str | None
    at_end: AtEnd
    network: NetworkBody
    published: Sequence[PublishedBody]
    labels: Mapping[str, str]
    epoch: int
    workspace_id: str | None = None
    key_id: str | None = None
    acquire_detail: str | None = None
    reason: str | None = None
    end_reason: EndReason | None = None
    pause: Pause | None = None

    @classmethod
    def of(cls, session: Session) -> SessionBody:
        """Return a session as clients see it."""
        return cls.take(
            session,
            ttl_seconds=_seconds(session.ttl_s),
            idle_timeout_seconds=_seconds(session.ttl_s),
            max_lifetime_seconds=_seconds(session.max_lifetime_s),
            network=NetworkBody.take(session.network, revision=session.network_revision),
            published=[PublishedBody.take(each) for each in session.published],
            **attrs.asdict(session.options, recurse=False),
        )


@attrs.frozen
class DoneBody(Body):
    """The request was carried out."""

    ok: Literal[True] = True


@attrs.frozen
class UsageQuery:
    """The query of samples: the times of the first one and of the last one at most, in Unix seconds."""

    start: int | None = None
    end: int | None = None


@attrs.frozen
class DiagnosisBody(Body):
    """A session and its state in each part of the system: a member for each part, or `{"unavailable": reason}`."""

    time: datetime
    session: SessionBody


def _seconds(span_s: float) -> float | None:
    """Return a span as clients see it: whole seconds as such, one without end as null."""
    if span_s == FOREVER_S:
        return None
    return int(span_s) if span_s.is_integer() else span_s


def _part(part: Part) -> Mapping[str, Any]:  # JSON values
    return {"unavailable": part.reason} if isinstance(part, MissingPart) else part


def server_timing(timings_ms: Mapping[str, float]) -> str:
    """Return phases as a `Server-Timing` value (W3C Server Timing §3)."""
    return ", ".join(f"{_NOT_A_TOKEN.sub('_', phase)};dur={ms:.3f}" for phase, ms in timings_ms.items())


# Handlers -------------------------------------------------------------------------------------------------------------


async def create(exchange: Exchange) -> Answer:
    """Create a session."""
    request = await read_request(exchange, CreateRequest)
    key_header = read_head(exchange, CreateHead).idempotency_key
    settings = exchange.settings
    spec = request.to_spec(
        default_limits=settings.default_limits, default_network=settings.default_network, key_header=key_header
    )
    spec = owned_spec(exchange.key, spec, default_network=settings.default_network)
    session = await exchange.supervisor.create(spec)
    headers = (("server-timing", server_timing(session.timings_ms)),) if session.timings_ms else ()
    return json_answer(SessionBody.of(session), status=201, headers=headers)


async def get(exchange: Exchange) -> Answer:
    """Read a session; one that has ended is an answer, not an error."""
    return _answer(await exchange.supervisor.get(exchange.session_id))


async def list_sessions(exchange: Exchange) -> Answer:
    """List sessions, newest first; without `status` the live ones."""
    query = read_query(exchange, SessionsQuery).to_query()
    page = await exchange.supervisor.find(owned_query(exchange.key, query))
    headers = () if page.next is None else ((NEXT_CURSOR, page.next.cursor),)
    sessions = within_reach(exchange.key, page.sessions)
    return await json_list_answer((SessionBody.of(session) for session in sessions), headers=headers)


async def update(exchange: Exchange) -> Answer:
    """Change a session's times, labels, limits, environment or network."""
    request = await read_request(exchange, PatchRequest)
    current = exchange.settings.default_limits
    if request.limits is not None:
        current = (await exchange.supervisor.get(exchange.session_id)).limits
    patch: SessionPatch = owned_patch(exchange.key, request.to_patch(current=current))
    return _answer(await exchange.supervisor.update(exchange.session_id, patch))


async def pause(exchange: Exchange) -> Answer:
    """Freeze every process of a session."""
    request = await read_request(exchange, PauseRequest)
    return _answer(await exchange.supervisor.pause(exchange.session_id, request.to_spec()))


async def resume(exchange: Exchange) -> Answer:
    """Let the processes of a paused session go on."""
    return _answer(await exchange.supervisor.resume(exchange.session_id))


async def destroy(exchange: Exchange) -> Answer:
    """Destroy a session; nothing changes on one that has ended."""
    await exchange.supervisor.destroy(exchange.session_id)
    return json_answer(DoneBody())


async def stats(exchange: Exchange) -> Answer:
    """Read a session's counters; one that the kernel does not offer is null."""
    found: SessionStats = await exchange.supervisor.stats(exchange.session_id)
    return json_answer(found)


async def usage(exchange: Exchange) -> Answer:
    """Read what a session used in the last hour, one sample for each 15 seconds. None is older than the daemon."""
    asked = read_query(exchange, UsageQuery)
    found = await exchange.supervisor.usage(
        exchange.session_id, asked.start or 0, math.inf if asked.end is None else asked.end
    )
    return await json_list_answer(found)


async def diagnostics(exchange: Exchange) -> Answer:
    """Look into a session, part by part; a part that is not available says why."""
    found = await exchange.supervisor.diagnose(exchange.session_id)
    body = to_plain(DiagnosisBody(found.time, SessionBody.of(found.session)))
    return json_answer(body | {name: to_plain(_part(part)) for name, part in found.parts.items()})


def _answer(session: Session) -> Answer:
    return json_answer(SessionBody.of(session))
