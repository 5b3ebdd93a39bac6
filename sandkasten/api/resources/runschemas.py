"""What clients send to the routes of runs, shells and processes: attrs classes, and the way from them to the model."""

from __future__ import annotations

import attrs

from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.resources.fields import (
    Argv,
    Base64,
    Environment,
    ExecId,
    Milliseconds,
    Path,
    Pattern,
    PortNumber,
    Shell,
    ShellName,
    SignalNumber,
    Text,
    User,
    WaitTarget,
)
from sandkasten.api.resources.schemas import TerminalRequest, bad_fields, check_command
from sandkasten.model import ProcessSpec, ShellSpec, WaitFor


@attrs.frozen
class SignalRequest:
    signal: SignalNumber


@attrs.frozen
class CancelRequest:
    now: bool | None = None


@attrs.frozen
class StdinRequest:
    text: str | None = attrs.field(default=None, repr=False)
    content_base64: Base64 | None = attrs.field(default=None, repr=False)
    close: bool | None = None

    @property
    def content(self) -> bytes:
        """What to send. Raises `InvalidRequest` unless there is one text at most, or an end."""
        if self.text is not None and self.content_base64 is not None:
            raise bad_fields(text="at most one of text and content_base64 is possible")
        if self.text is None and self.content_base64 is None and not self.close:
            raise bad_fields(text="one of text, content_base64 and close is needed")
        return self.text.encode() if self.text is not None else bytes(self.content_base64 or b"")


@attrs.frozen
class ShellRequest:
    name: ShellName
    shell: Shell | None = None
    cwd: Path | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    user: User | None = None

    def to_spec(self) -> ShellSpec:
        return ShellSpec(name=self.name, shell=self.shell, cwd=self.cwd, env=self.env or {}, user=self.user)


@attrs.frozen
class ProcessRequest:
    cmd: Text | None = attrs.field(default=None, repr=False)
    argv: Argv | None = attrs.field(default=None, repr=False)
    process_id: ExecId | None = None
    cwd: Path | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    user: User | None = None
    tty: TerminalRequest | None = None
    keep_alive: bool | None = None

    def to_spec(self, settings: ApiSettings) -> ProcessSpec:
        """Return the model's process. Raises `InvalidRequest`, `TooLarge`."""
        check_command(self.cmd, self.argv, settings)
        return ProcessSpec(
            command=self.cmd,
            argv=self.argv,
            process_id=self.process_id,
            cwd=self.cwd,
            env=self.env or {},
            user=self.user,
            terminal=None if self.tty is None else self.tty.size,
            keep_alive=bool(self.keep_alive),
        )


@attrs.frozen
class WaitRequest:
    """What to wait for; `for_` is spelled `for`."""

    for_: WaitTarget | None = None
    port: PortNumber | None = None
    pattern: Pattern | None = None
    timeout_ms: Milliseconds | None = None

    def to_condition(self) -> WaitFor:
        """Return the model's condition. Raises `InvalidRequest` unless there is exactly one."""
        if [self.for_, self.port, self.pattern].count(None) != 2:
            raise bad_fields(**{"for": "exactly one of for, port and pattern is needed"})
        return WaitFor(exit=self.for_ is not None, port=self.port, pattern=self.pattern)
