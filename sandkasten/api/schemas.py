"""What clients send: attrs classes, and the way from them to the model.

Unknown fields are ignored; a known field never is: what this server does not offer is refused by name, because a
client that asked for it would otherwise believe it has it.
"""

from __future__ import annotations

from typing import TypeVar

import attrs
import cattrs

from sandkasten.api.fields import (
    TOKEN,
    TOKEN_RULE,
    Base64,
    Cores,
    DiskMegabytes,
    Encoding,
    Environment,
    ExecMode,
    Labels,
    Lifetime,
    MemoryMegabytes,
    Milliseconds,
    NamedShell,
    NetworkMode,
    NoHosts,
    NotOffered,
    OnDisconnect,
    OnTimeout,
    Path,
    Pids,
    Shell,
    Text,
    Token,
    Ttl,
    WorkspaceId,
    make_converter,
)
from sandkasten.api.jsontext import decode_object
from sandkasten.errors import InvalidImage, InvalidRequest, TooLarge
from sandkasten.model import IMAGE_NAME, ExecSpec, Limits, SessionPatch, SessionSpec

T = TypeVar("T")

_ABSENT = NotOffered(None)
"""The default of a field that is refused even as null, because null would ask for something, too."""


@attrs.frozen
class LimitsRequest:
    cpu: Cores | None = None
    memory_mb: MemoryMegabytes | None = None
    pids: Pids | None = None
    disk_mb: DiskMegabytes | None = None

    def over(self, base: Limits) -> Limits:
        """Return `base` with what was asked for."""
        asked = attrs.asdict(self, filter=lambda _attribute, value: value is not None)
        return attrs.evolve(base, **asked)


@attrs.frozen
class NetworkRequest:
    mode: NetworkMode | None = None
    allow: NoHosts | None = None


@attrs.frozen
class CreateRequest:
    image: str | None = None
    ttl_seconds: Ttl | None = None
    workspace_id: WorkspaceId | None = None
    idempotency_key: Token | None = None
    labels: Labels | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    limits: LimitsRequest | None = None
    max_lifetime_seconds: Lifetime | None = None
    readonly_rootfs: bool | None = None
    shell: Shell | None = None
    network: NetworkRequest | None = None
    exec_mode: ExecMode | None = None
    idle_timeout_seconds: NotOffered = _ABSENT

    def to_spec(self, *, default_limits: Limits, key_header: str | None) -> SessionSpec:
        """Return the model's wish.

        Raises:
            InvalidImage: the image's name is malformed.
            InvalidRequest: the body's idempotency key and the header's differ, or the header's is malformed.
        """
        if self.image is not None and not IMAGE_NAME.match(self.image):
            raise InvalidImage("the image name is malformed", image=self.image[:100])
        return SessionSpec(
            image=self.image,
            ttl_s=float(self.ttl_seconds) if self.ttl_seconds else None,
            workspace_id=self.workspace_id,
            labels=self.labels or {},
            env=self.env or {},
            limits=None if self.limits is None else self.limits.over(default_limits),
            max_lifetime_s=None if self.max_lifetime_seconds is None else float(self.max_lifetime_seconds),
            readonly_rootfs=self.readonly_rootfs,
            shell=self.shell,
            idempotency_key=_one_key(self.idempotency_key, key_header),
        )


@attrs.frozen
class PatchRequest:
    ttl_seconds: Ttl | None = None
    labels: Labels | None = None
    limits: LimitsRequest | None = None
    env: NotOffered | None = None
    idle_timeout_seconds: NotOffered = _ABSENT

    def to_patch(self, *, current: Limits) -> SessionPatch:
        """Return the model's change; `current` fills what a partial `limits` leaves open."""
        return SessionPatch(
            ttl_s=float(self.ttl_seconds) if self.ttl_seconds else None,
            labels=self.labels,
            limits=None if self.limits is None else self.limits.over(current),
        )


@attrs.frozen
class ExecRequest:
    cmd: Text = attrs.field(repr=False)
    timeout_ms: Milliseconds | None = None
    raw_output: bool | None = None
    encoding: Encoding | None = None
    cwd: Path | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    stdin: str | None = attrs.field(default=None, repr=False)
    exec_id: Token | None = None
    on_timeout: OnTimeout | None = None
    on_disconnect: OnDisconnect | None = None
    shell: NamedShell | None = None
    mode: ExecMode | None = None
    tty: NotOffered | None = None
    argv: NotOffered | None = None

    def to_spec(self, *, max_command_bytes: int, max_timeout_ms: int) -> ExecSpec:
        """Return the model's command; a timeout above the maximum is the maximum.

        Raises:
            TooLarge: the command is longer than `max_command_bytes`.
        """
        cmd_bytes = len(self.cmd.encode())
        if cmd_bytes > max_command_bytes:
            raise TooLarge(
                "the command is too long",
                cmd_bytes=cmd_bytes,
                max_cmd_bytes=max_command_bytes,
                recommendation="write the script to a file with fs/write or fs/upload and run that",
            )
        return ExecSpec(
            command=self.cmd,
            timeout_ms=min(self.timeout_ms or max_timeout_ms, max_timeout_ms),
            cwd=self.cwd,
            env=self.env or {},
            stdin=None if self.stdin is None else self.stdin.encode(),
            exec_id=self.exec_id,
        )

    @property
    def is_base64(self) -> bool:
        return self.encoding == "base64"


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
    """Return the request in a JSON body.

    Raises:
        InvalidRequest: `details` maps the path of each bad field to what is wrong with it.
    """
    try:
        return _converter.structure(decode_object(body), cls)
    except cattrs.BaseValidationError as error:
        problems = (line.rpartition(" @ $.") for line in cattrs.transform_error(error, format_exception=_describe))
        raise InvalidRequest("the request has bad fields", **{path: what for what, _, path in problems}) from None


def _describe(error: BaseException, _type: type | None) -> str:
    if isinstance(error, KeyError):
        return "is required"
    return str(error) if isinstance(error, ValueError) else "has the wrong type"


def _one_key(in_body: str | None, in_header: str | None) -> str | None:
    if in_header is not None and not TOKEN.match(in_header):
        raise InvalidRequest("the Idempotency-Key header is malformed", idempotency_key=TOKEN_RULE)
    if None not in (in_body, in_header) and in_body != in_header:
        raise InvalidRequest("two different idempotency keys", idempotency_key="body and header differ")
    return in_body if in_body is not None else in_header


_converter = make_converter()
