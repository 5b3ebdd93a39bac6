"""What clients send: attrs classes, and the way from them to the model.

Unknown fields are ignored; a known field never is: what this server does not offer is refused by name, because a
client that asked for it would otherwise believe it has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import cattrs

from sandkasten.api.http.json import decode_object
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.resources.fields import (
    TOKEN,
    TOKEN_RULE,
    Argv,
    Base64,
    Cells,
    Cores,
    DiskInodes,
    DiskMegabytes,
    Encoding,
    Environment,
    EnvironmentPatch,
    ExecId,
    ExecMode,
    Fixed,
    IdleTimeout,
    Labels,
    Lifetime,
    MemoryInodes,
    MemoryMegabytes,
    Milliseconds,
    NetworkMode,
    NoHosts,
    OnTimeout,
    OpenFiles,
    Path,
    Pids,
    Places,
    SeccompName,
    Shell,
    ShellName,
    ShmMegabytes,
    Stdin,
    Text,
    TmpMegabytes,
    Token,
    Ttl,
    User,
    WhenLeft,
    WorkspaceId,
    WorkspaceModeName,
    make_converter,
)
from sandkasten.model import (
    DEFAULT_SHELL,
    FOREVER_S,
    IMAGE_NAME,
    ExecSpec,
    FileRules,
    Limits,
    OnDisconnect,
    PauseSpec,
    SessionPatch,
    SessionSpec,
    TerminalSize,
)
from sandkasten.model.errors import InvalidImage, InvalidRequest, TooLarge

T = TypeVar("T")

_MAXIMUM_MS = Milliseconds(0)

_NO_IDLE_TIMEOUT = IdleTimeout(0)
_NO_LIFETIME = Lifetime(0)
"""The defaults of fields that take null, too: null means no end, and absent that nothing was said."""

_SAME = Fixed(None)


@attrs.frozen
class LimitsRequest:
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
        """Return `base` with what was asked for."""
        asked = attrs.asdict(self, filter=lambda _attribute, value: value is not None)
        return attrs.evolve(base, **asked)


@attrs.frozen
class LimitsChange(LimitsRequest):
    """The same for a session that lives."""

    open_files: Fixed = _SAME  # type: ignore[assignment]  # narrower: nothing is taken
    tmp_mb: Fixed = _SAME  # type: ignore[assignment]
    tmp_inodes: Fixed = _SAME  # type: ignore[assignment]
    shm_mb: Fixed = _SAME  # type: ignore[assignment]
    shm_inodes: Fixed = _SAME  # type: ignore[assignment]


@attrs.frozen
class NetworkRequest:
    mode: NetworkMode | None = None
    allow: NoHosts | None = None


@attrs.frozen
class FilesystemRequest:
    readable: Places | None = None
    writable: Places | None = None

    @property
    def rules(self) -> FileRules | None:
        """The model's rules; none when nothing is restricted."""
        return None if self.readable is None and self.writable is None else FileRules(self.readable, self.writable)


@attrs.frozen
class CreateRequest:
    image: str | None = None
    ttl_seconds: Ttl | None = None
    workspace_id: WorkspaceId | None = None
    workspace_mode: WorkspaceModeName | None = None
    idempotency_key: Token | None = None
    labels: Labels | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    limits: LimitsRequest | None = None
    idle_timeout_seconds: IdleTimeout | None = _NO_IDLE_TIMEOUT
    max_lifetime_seconds: Lifetime | None = _NO_LIFETIME
    readonly_rootfs: bool | None = None
    shell: Shell | None = None
    network: NetworkRequest | None = None
    exec_mode: ExecMode | None = None
    user: User | None = None
    root_inside: bool | None = None
    filesystem: FilesystemRequest | None = None
    seccomp: SeccompName | None = None

    def to_spec(self, *, default_limits: Limits, key_header: str | None) -> SessionSpec:
        """Return the model's wish.

        Raises:
            InvalidImage: the image's name is malformed.
            InvalidRequest: the body's idempotency key and the header's differ, or the header's is malformed, or two
                idle timeouts differ.
        """
        if self.image is not None and not IMAGE_NAME.match(self.image):
            raise InvalidImage("the image name is malformed", image=self.image[:100])
        return SessionSpec(
            image=self.image,
            ttl_s=_one_timeout(self.ttl_seconds, self.idle_timeout_seconds),
            workspace_id=self.workspace_id,
            workspace_mode=self.workspace_mode,
            labels=self.labels or {},
            env=self.env or {},
            limits=None if self.limits is None else self.limits.over(default_limits),
            max_lifetime_s=_span(self.max_lifetime_seconds),
            readonly_rootfs=self.readonly_rootfs,
            shell=self.shell,
            exec_mode=self.exec_mode,
            user=self.user,
            root_inside=self.root_inside,
            filesystem=None if self.filesystem is None else self.filesystem.rules,
            seccomp=self.seccomp,
            idempotency_key=_one_key(self.idempotency_key, key_header),
        )


@attrs.frozen
class PatchRequest:
    ttl_seconds: Ttl | None = None
    labels: Labels | None = None
    limits: LimitsChange | None = None
    env: EnvironmentPatch | None = attrs.field(default=None, repr=False)
    idle_timeout_seconds: IdleTimeout | None = _NO_IDLE_TIMEOUT
    max_lifetime_seconds: Lifetime | None = _NO_LIFETIME

    def to_patch(self, *, current: Limits) -> SessionPatch:
        """Return the model's change; `current` fills what a partial `limits` leaves open. Raises `InvalidRequest` if
        two idle timeouts differ."""
        return SessionPatch(
            ttl_s=_one_timeout(self.ttl_seconds, self.idle_timeout_seconds),
            max_lifetime_s=_span(self.max_lifetime_seconds),
            labels=self.labels,
            limits=None if self.limits is None else self.limits.over(current),
            env=self.env,
        )


@attrs.frozen
class PauseRequest:
    auto_resume: bool | None = None
    stop_lease: bool | None = None

    def to_spec(self) -> PauseSpec:
        """Return the model's wish."""
        return PauseSpec(auto_resume=self.auto_resume is not False, stop_lease=bool(self.stop_lease))


@attrs.frozen(kw_only=True)
class OutputFormat:
    """How a client wants to have output: exact bytes, or text, raw or cleaned; and whether a timeout is an error."""

    is_base64: bool = False
    is_raw: bool = False
    is_timeout_error: bool = True


@attrs.frozen
class TerminalRequest:
    cols: Cells
    rows: Cells

    @property
    def size(self) -> TerminalSize:
        return TerminalSize(self.cols, self.rows)


@attrs.frozen
class ExecRequest:
    """A command. In `timeout_ms` 0 means the maximum, as if it were absent, and null means none at all."""

    cmd: Text | None = attrs.field(default=None, repr=False)
    argv: Argv | None = attrs.field(default=None, repr=False)
    mode: ExecMode | None = None
    shell: ShellName | None = None
    user: User | None = None
    timeout_ms: Milliseconds | None = _MAXIMUM_MS
    cwd: Path | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    stdin: Stdin | None = attrs.field(default=None, repr=False)
    tty: TerminalRequest | None = None
    exec_id: ExecId | None = None
    raw_output: bool | None = None
    encoding: Encoding | None = None
    on_timeout: OnTimeout | None = None
    on_disconnect: WhenLeft | None = None

    def to_spec(self, settings: ApiSettings, *, exec_id: str | None = None) -> ExecSpec:
        """Return the model's command; a timeout above the maximum is the maximum. `exec_id` is made for one without.

        Raises:
            TooLarge: the command is longer than `max_command_bytes`.
            InvalidRequest: fields contradict each other, or no limit in time is asked for and not allowed.
        """
        check_command(self.cmd, self.argv, settings)
        self._check_place()
        is_unlimited = self.timeout_ms is None
        if is_unlimited and not settings.allow_unlimited_exec:
            raise bad_fields(timeout_ms="must not be null on this server: every command has a limit in time")
        if self.tty is not None and self.stdin is not None and not self.stdin.is_open:
            raise bad_fields(stdin="must be absent or true with tty: what is typed is sent later")
        return ExecSpec(
            command=self.cmd,
            argv=self.argv,
            shell=self.shell or DEFAULT_SHELL,
            stateless=None if self.mode is None else self.mode == "stateless",
            timeout_ms=None if is_unlimited else clamp_timeout(self.timeout_ms, settings),
            unlimited=is_unlimited,
            cwd=self.cwd,
            env=self.env or {},
            user=self.user,
            stdin=None if self.stdin is None or self.stdin.is_open else self.stdin.text.encode(),
            stdin_open=self.stdin is not None and self.stdin.is_open,
            terminal=None if self.tty is None else self.tty.size,
            exec_id=self.exec_id or exec_id,
            has_new_id=self.exec_id is None and exec_id is not None,
        )

    def when_left(self, default: OnDisconnect) -> OnDisconnect:
        """Return what becomes of the command when its client leaves."""
        return default if self.on_disconnect is None else OnDisconnect(self.on_disconnect)

    def _check_place(self) -> None:
        """Refuse what can't be had where the command runs."""
        if self.argv is not None and self.mode == "stateful":
            raise bad_fields(mode="must be 'stateless' or absent with argv: a program runs beside the shells")
        is_program = self.argv is not None or self.mode == "stateless"
        if is_program and self.shell not in (None, DEFAULT_SHELL):
            raise bad_fields(shell="must be absent for what runs beside the shells")
        if self.mode == "stateful" and self.user is not None:
            raise bad_fields(user="needs argv or the mode 'stateless': a shell has its user")

    @property
    def output_format(self) -> OutputFormat:
        return OutputFormat(
            is_base64=self.encoding == "base64",
            is_raw=bool(self.raw_output),
            is_timeout_error=self.on_timeout != "result",
        )


def check_command(cmd: str | None, argv: tuple[str, ...] | None, settings: ApiSettings) -> None:
    """Check that there is exactly one of the two and that it is not too long. Raises `InvalidRequest`, `TooLarge`."""
    if (cmd is None) == (argv is None):
        raise bad_fields(cmd="is required" if cmd is None else "exactly one of cmd and argv is needed")
    size = len((cmd or "").encode()) + sum(len(argument.encode()) + 1 for argument in argv or ())
    if size > settings.max_command_bytes:
        raise TooLarge(
            "the command is too long",
            cmd_bytes=size,
            max_cmd_bytes=settings.max_command_bytes,
            recommendation="write the script to a file with fs/write or fs/upload and run that",
        )


def clamp_timeout(asked_ms: int | None, settings: ApiSettings) -> int:
    """Return a time limit: what was asked for up to the maximum, which absent and 0 stand for."""
    return min(asked_ms or settings.max_exec_timeout_ms, settings.max_exec_timeout_ms)


def bad_fields(**problems: str) -> InvalidRequest:
    """Return the refusal of a request that names each bad field."""
    return InvalidRequest("the request has bad fields", **problems)


@attrs.frozen
class WriteRequest:
    path: Path
    text: str | None = attrs.field(default=None, repr=False)
    content_base64: Base64 | None = attrs.field(default=None, repr=False)

    @property
    def content(self) -> bytes:
        """What to write. Raises `InvalidRequest` unless exactly one of the two fields is there."""
        if (self.text is None) == (self.content_base64 is None):
            raise InvalidRequest("give the content once", text="exactly one of text and content_base64 is needed")
        return self.text.encode() if self.text is not None else bytes(self.content_base64 or b"")


def parse(body: bytes, cls: type[T]) -> T:
    """Return the request in a JSON body; raises as `structure`."""
    return structure(decode_object(body), cls, _converter)


def structure(value: Mapping[str, Any], cls: type[T], converter: cattrs.Converter) -> T:  # Any: JSON
    """Return the request in a JSON object; `converter` is one that `make_converter` made.

    Raises:
        InvalidRequest: `details` maps the path of each bad field to what is wrong with it.
    """
    try:
        return converter.structure(value, cls)
    except cattrs.BaseValidationError as error:
        problems = (line.rpartition(" @ $.") for line in cattrs.transform_error(error, format_exception=_describe))
        raise bad_fields(**{path.removesuffix("_"): what for what, _, path in problems}) from None


def _describe(error: BaseException, _type: type | None) -> str:
    if isinstance(error, KeyError):
        return "is required"
    return str(error) if isinstance(error, ValueError) else "has the wrong type"


def _one_timeout(ttl_seconds: int | None, idle_timeout_seconds: int | None) -> float | None:
    """Return the idle timeout, of which the older name says with null as with 0 that the default is wanted."""
    asked, span_s = float(ttl_seconds) if ttl_seconds else None, _span(idle_timeout_seconds)
    if asked is not None and span_s is not None and asked != span_s:
        raise bad_fields(idle_timeout_seconds="is the same as ttl_seconds, and differs from it")
    return span_s if asked is None else asked


def _span(seconds: int | None) -> float | None:
    """Return a time as the model has it: null is without end, 0 stands for an absent field."""
    if seconds is None:
        return FOREVER_S
    return float(seconds) if seconds else None


def _one_key(in_body: str | None, in_header: str | None) -> str | None:
    if in_header is not None and not TOKEN.match(in_header):
        raise InvalidRequest("the Idempotency-Key header is malformed", idempotency_key=TOKEN_RULE)
    if None not in (in_body, in_header) and in_body != in_header:
        raise InvalidRequest("two different idempotency keys", idempotency_key="body and header differ")
    return in_body if in_body is not None else in_header


_converter = make_converter()
