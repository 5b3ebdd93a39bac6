"""The kinds of field that request bodies are made of: one named type and one check each, and the strict converter.

Values keep their JSON type (no "1" for 1, no true for 1). A check returns the value or raises `ValueError` with what
the client reads. Knows no request.

Fields of a query, one function per kind. A field that is there and bad is refused by name, never ignored.
"""

from __future__ import annotations

import base64
import binascii
import re
import signal
from collections.abc import Callable, Mapping
from typing import Any, NewType

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from sandkasten.api.http.exchange import Exchange
from sandkasten.model import EXEC_ID, FIXED_BOUNDS, LIMIT_BOUNDS, MAX_SPAN_S, SECCOMP_NAME, SHELL_NAME, WORKSPACE_ID
from sandkasten.model.errors import InvalidRequest
from sandkasten.model.workspace import QUOTA_BYTES_BOUNDS, QUOTA_FILES_BOUNDS

MAX_TTL_S = 86_400
MAX_LIFETIME_S = int(MAX_SPAN_S)
MAX_PATH_BYTES = 4096
MAX_ENV_BYTES = 128 * 1024
MAX_ENV_NAMES = 4096
MAX_LABELS = 64
MAX_LABEL_CHARS = 256
MAX_PLACES = 64
"""Paths in one list of a session's file rules, as the runner has it."""
MAX_ARGUMENTS = 4096
MAX_CELLS = 1000
MAX_PATTERN_CHARS = 1000
MAX_SIGNAL = 64

Ttl = NewType("Ttl", int)
Lifetime = NewType("Lifetime", int)
IdleTimeout = NewType("IdleTimeout", int)
Milliseconds = NewType("Milliseconds", int)
Cores = NewType("Cores", float)
MemoryMegabytes = NewType("MemoryMegabytes", int)
DiskMegabytes = NewType("DiskMegabytes", int)
DiskInodes = NewType("DiskInodes", int)
Pids = NewType("Pids", int)
OpenFiles = NewType("OpenFiles", int)
TmpMegabytes = NewType("TmpMegabytes", int)
ShmMegabytes = NewType("ShmMegabytes", int)
MemoryInodes = NewType("MemoryInodes", int)
Fixed = NewType("Fixed", object)
Token = NewType("Token", str)
ExecId = NewType("ExecId", str)
WorkspaceId = NewType("WorkspaceId", str)
QuotaBytes = NewType("QuotaBytes", int)
QuotaFiles = NewType("QuotaFiles", int)
WorkspaceModeName = NewType("WorkspaceModeName", str)
Text = NewType("Text", str)
Path = NewType("Path", str)
Base64 = NewType("Base64", bytes)
Environment = NewType("Environment", dict[str, str])
Labels = NewType("Labels", dict[str, str])
Shell = NewType("Shell", str)
ShellName = NewType("ShellName", str)
User = NewType("User", str)
Argv = NewType("Argv", tuple[str, ...])
Cells = NewType("Cells", int)
SignalNumber = NewType("SignalNumber", int)
PortNumber = NewType("PortNumber", int)
Pattern = NewType("Pattern", str)
EnvironmentPatch = NewType("EnvironmentPatch", dict[str, str | None])
NetworkMode = NewType("NetworkMode", str)
ExecMode = NewType("ExecMode", str)
SeccompName = NewType("SeccompName", str)
Encoding = NewType("Encoding", str)
OnTimeout = NewType("OnTimeout", str)
WhenLeft = NewType("WhenLeft", str)
NoHosts = NewType("NoHosts", list[str])
Places = NewType("Places", tuple[str, ...])
WaitTarget = NewType("WaitTarget", str)


@attrs.frozen
class Stdin:
    """What a command reads: this text and then the end, or, open, what is sent to it later."""

    text: str = attrs.field(default="", repr=False)
    is_open: bool = False


def check_path(value: object) -> str:
    """Return a path that the file routes can hand on. Raises `ValueError` saying why not."""
    text = _text(value)
    if not text or len(text.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"must have 1 to {MAX_PATH_BYTES} bytes")
    return text


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _text(value: object) -> str:
    """Text that reaches the kernel as a C string."""
    if "\0" in _string(value):
        raise ValueError("must not contain NUL")
    return _encodable(value)


def _encodable(value: object) -> str:
    text = _string(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not contain lone surrogates") from None
    return text


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


@attrs.frozen
class Between:
    """A check for integers from `low` to `high`."""

    low: float
    high: float

    def __call__(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError("must be an integer")
        if not self.low <= value <= self.high:
            raise ValueError(f"must be between {self.low} and {self.high}")
        return value


def _cores(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("must be a number")
    low, high = LIMIT_BOUNDS["cpu"]
    if not low <= value <= high:
        raise ValueError(f"must be between {low} and {high}")
    return float(value)


@attrs.frozen
class Matching:
    """A check for text of a form; `rule` says it in words."""

    pattern: re.Pattern[str]
    rule: str

    def __call__(self, value: object) -> str:
        if not self.pattern.match(_string(value)):
            raise ValueError(self.rule)
        return str(value)


@attrs.frozen
class Choice:
    """A check for one of a few words; `not_offered` are known, and not to be had here."""

    offered: tuple[str, ...]
    not_offered: tuple[str, ...] = ()

    def __call__(self, value: object) -> str:
        text = _string(value)
        if text in self.not_offered:
            raise ValueError(f"{text!r} is not available on this server")
        if text not in self.offered:
            raise ValueError(f"must be one of {', '.join(map(repr, self.offered))}")
        return text


def _stdin(value: object) -> Stdin:
    if value is True:
        return Stdin(is_open=True)
    if not isinstance(value, str):
        raise ValueError("must be a string, or true for input that is sent later")
    return Stdin(text=_encodable(value))


def _argv(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ARGUMENTS:
        raise ValueError(f"must be an array of 1 to {MAX_ARGUMENTS} strings")
    arguments = tuple(_text(argument) for argument in value)
    if not arguments[0]:
        raise ValueError("must begin with the name of a program")
    return arguments


def _places(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_PLACES:
        raise ValueError(f"must be an array of at most {MAX_PLACES} absolute paths")
    places = tuple(check_path(path) for path in value)
    if not all(path.startswith("/") and path.isprintable() for path in places):
        raise ValueError("must hold absolute paths of printable characters")
    return places


def _signal_number(value: object) -> int:
    """A number, or a name with or without SIG (signal(7))."""
    if isinstance(value, str):
        name = value if value.startswith("SIG") else f"SIG{value}"
        if name not in signal.Signals.__members__:
            raise ValueError("is no name of a signal")
        return int(signal.Signals[name])
    return Between(1, MAX_SIGNAL)(value)


def _pattern(value: object) -> str:
    text = _string(value)
    if not 1 <= len(text) <= MAX_PATTERN_CHARS:
        raise ValueError(f"must have 1 to {MAX_PATTERN_CHARS} characters")
    return text


def _no_hosts(value: object) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("must be an array")
    if value:
        raise ValueError("no host can be reached on this server; only an empty array is accepted")
    return []


def _fixed(_value: object) -> object:
    raise ValueError("is fixed when the session is made")


def _base64(value: object) -> bytes:
    try:
        return base64.b64decode(_string(value), validate=True)
    except binascii.Error:
        raise ValueError("must be base64") from None


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RESERVED = "__sk_"


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of strings")
    _check_names(value)
    for name, content in value.items():
        if not _VARIABLE.match(name):
            raise ValueError(f"{name[:100]!r} is not a variable name")
        if name.startswith(_RESERVED):
            raise ValueError(f"{name[:100]!r} can't be had: names that begin with {_RESERVED} belong to the runner")
        _text(content)
    if sum(len(name) + len(content.encode()) + 2 for name, content in value.items()) > MAX_ENV_BYTES:
        raise ValueError(f"must not be larger than {MAX_ENV_BYTES} bytes")
    return dict(value)


def _check_names(variables: Mapping[str, object]) -> None:
    """Before anything is looked at one by one."""
    if len(variables) > MAX_ENV_NAMES:
        raise ValueError(f"must not have more than {MAX_ENV_NAMES} names")


def _environment_patch(value: object) -> dict[str, str | None]:
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of strings and nulls")
    _check_names(value)
    _environment({name: "" if content is None else content for name, content in value.items()})
    return dict(value)


def _labels(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MAX_LABELS:
        raise ValueError(f"must be an object of at most {MAX_LABELS} strings")
    if any(not name or max(len(name), len(_text(text))) > MAX_LABEL_CHARS for name, text in value.items()):
        raise ValueError(f"names and values must have at most {MAX_LABEL_CHARS} characters")
    return dict(value)


TOKEN = re.compile(r"[\x21-\x7e]{1,128}\Z")
TOKEN_RULE = "must be 1 to 128 visible ASCII characters"
_USER = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_.-]{0,31}|[0-9]{1,10}(?::[0-9]{1,10})?)\Z")

_CHECKS: dict[Any, Callable[[object], object]] = {  # keys: types and NewTypes
    str: _string,
    bool: _boolean,
    int: Between(-(2**53), 2**53),
    Ttl: Between(0, MAX_TTL_S),
    Lifetime: Between(1, MAX_LIFETIME_S),
    IdleTimeout: Between(1, MAX_LIFETIME_S),
    Milliseconds: Between(0, 2**53),
    Cores: _cores,
    MemoryMegabytes: Between(*LIMIT_BOUNDS["memory_mb"]),
    DiskMegabytes: Between(*LIMIT_BOUNDS["disk_mb"]),
    DiskInodes: Between(*LIMIT_BOUNDS["disk_inodes"]),
    QuotaBytes: Between(*QUOTA_BYTES_BOUNDS),
    QuotaFiles: Between(*QUOTA_FILES_BOUNDS),
    Pids: Between(*LIMIT_BOUNDS["pids"]),
    OpenFiles: Between(*FIXED_BOUNDS["open_files"]),
    TmpMegabytes: Between(*FIXED_BOUNDS["tmp_mb"]),
    ShmMegabytes: Between(*FIXED_BOUNDS["shm_mb"]),
    MemoryInodes: Between(*FIXED_BOUNDS["tmp_inodes"]),
    Fixed: _fixed,
    Token: Matching(TOKEN, TOKEN_RULE),
    WorkspaceId: Matching(WORKSPACE_ID, "must be 2 to 64 of a-z, 0-9, '.', '_', '-', no sign at either end"),
    WorkspaceModeName: Choice(("shared", "exclusive")),
    Text: _text,
    Path: check_path,
    Base64: _base64,
    Environment: _environment,
    Labels: _labels,
    Shell: Choice(("bash", "sh")),
    ShellName: Matching(
        SHELL_NAME, "must be 1 to 32 of A-Z, a-z, 0-9, '.', '_', '-', and begin with none of these signs"
    ),
    ExecId: Matching(EXEC_ID, TOKEN_RULE),
    User: Matching(_USER, "must be a user's name, or UID or UID:GID as numbers"),
    Stdin: _stdin,
    Argv: _argv,
    Places: _places,
    Cells: Between(1, MAX_CELLS),
    SignalNumber: _signal_number,
    PortNumber: Between(1, 65_535),
    Pattern: _pattern,
    EnvironmentPatch: _environment_patch,
    WaitTarget: Choice(("exit",)),
    NetworkMode: Choice(("none",), not_offered=("proxy", "bridge", "host")),
    ExecMode: Choice(("stateful", "stateless")),
    SeccompName: Matching(SECCOMP_NAME, "must be the name of a system call filter, such as strict or debug"),
    Encoding: Choice(("utf-8", "base64")),
    OnTimeout: Choice(("error", "result")),
    WhenLeft: Choice(("cancel", "detach")),
    NoHosts: _no_hosts,
}


def check_of(kind: object) -> Callable[[object], object] | None:
    """Return the check of a kind of field; None for what is none."""
    return _CHECKS.get(kind)


def make_converter() -> cattrs.Converter:
    """Return a converter that knows every kind of field above, and attrs classes as JSON objects."""
    converter = cattrs.Converter(detailed_validation=True)
    for kind, check in _CHECKS.items():
        converter.register_structure_hook(kind, _hook(check))
    converter.register_structure_hook_factory(attrs.has, lambda cls: _object_hook(cls, converter))
    return converter


def _hook(check: Callable[[object], object]) -> Callable[[object, type], object]:
    return lambda value, _type: check(value)


def _object_hook(cls: type, converter: cattrs.Converter) -> Callable[[object, type], object]:
    """Return what makes a `cls` of an object; the field `for_` is named `for` there."""
    names = {field.name: override(rename=field.name[:-1]) for field in attrs.fields(cls) if field.name.endswith("_")}
    fields: Callable[[Mapping[str, Any], type], object]  # Any: JSON
    fields = make_dict_structure_fn(cls, converter, **names)  # type: ignore[arg-type]

    def structure(value: object, _type: type) -> object:
        if not isinstance(value, dict):  # a string would pass: "mode" is in "mode", and no field would be found
            raise ValueError("must be an object")
        return fields(value, cls)

    return structure


def query_integer(exchange: Exchange, name: str, *, default: int, low: int = 1, high: int) -> int:
    """Return an integer from `low` to `high`. Raises `InvalidRequest`."""
    text = exchange.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 18 and low <= int(text) <= high):
        raise bad_query(name, f"must be an integer between {low} and {high}")
    return int(text)


def query_choice(exchange: Exchange, name: str, *choices: str) -> str | None:
    """Return one of `choices`, or None if the field is not there. Raises `InvalidRequest`."""
    text = exchange.query.get(name)
    if text is not None and text not in choices:
        raise bad_query(name, f"must be one of {', '.join(choices)}")
    return text


def query_flag(exchange: Exchange, name: str) -> bool:
    """Return whether `true` was said. Raises `InvalidRequest`."""
    return query_choice(exchange, name, "true", "false") == "true"


def bad_query(name: str, problem: str) -> InvalidRequest:
    """Return the refusal of one field."""
    return InvalidRequest("the query has bad fields", **{name: problem})
