"""Kinds of field that requests are made of, and the strict reading of bodies and queries into attrs classes.

Each kind is a named type with one check, which returns the value or raises `ValueError` with the words the client
reads. Values in JSON keep their type (no "1" for 1, no true for 1); in a query numbers and flags are text. Unknown
fields of a body are ignored and named in the answer's header `Sandkasten-Ignored`; unknown ones of a query, or of a
`strict` class, are refused, since they narrow a list, name a place or are a condition. `openapi.py` describes the kinds
as JSON Schema. Knows no request.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import enum
import functools
import os
import re
import signal
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from runner.wire.protocol import MAX_CONTEXT, MAX_EDITS, MAX_MATCHES, MAX_SEARCHED_BYTES
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import decode_object
from sandkasten.errors import InvalidRequest
from sandkasten.model import (
    ACCOUNT,
    ACCOUNT_RULE,
    EXEC_ID,
    FIXED_BOUNDS,
    LIMIT_BOUNDS,
    MAX_SPAN_S,
    MAX_TTL_S,
    SECCOMP_NAME,
    SESSION_ID,
    SHELL_NAME,
    STOP_GRACE_BOUNDS_MS,
    WORKSPACE_ID,
    EventType,
    ExecKind,
    ExecState,
    Status,
    Stream,
    StreamsMode,
)
from sandkasten.model.workspace import QUOTA_BYTES_BOUNDS, QUOTA_FILES_BOUNDS

T = TypeVar("T")

MAX_LIFETIME_S = int(MAX_SPAN_S)
MAX_PATH_BYTES = 4096
MAX_ENV_BYTES = 128 * 1024
MAX_ENV_NAMES = 4096
MAX_LABELS = 64
MAX_LABEL_CHARS = 256
MAX_PLACES = 64
"""Paths in one list of a session's file rules; the runner has the same bound."""
MAX_ARGUMENTS = 4096
MAX_CELLS = 1000
MAX_PATTERN_CHARS = 1000
MAX_SIGNAL = 64
MAX_LIST = 10_000
MAX_FILES = 1000
MAX_PATHS = 1000
"""Paths in one request about many files."""
MAX_DEPTH = 32
MAX_FILE_ID = 65535
_MAX_NAME_CHARS = 64
_NONE = "is unknown; this request has no fields"
_MOST_UNKNOWN = 32
MAX_OUTPUT_BYTES = 4 * 1024 * 1024
MIN_WINDOW_BYTES = 1024
MAX_WINDOW_BYTES = 16 * 1024 * 1024
TOP = "/workspace"
"""The directory of a workspace, as a session sees it."""

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
StopGrace = NewType("StopGrace", int)
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
Account = NewType("Account", str)
Argv = NewType("Argv", tuple[str, ...])
Words = NewType("Words", tuple[str, ...])
Cells = NewType("Cells", int)
SignalNumber = NewType("SignalNumber", int)
PortNumber = NewType("PortNumber", int)
Pattern = NewType("Pattern", str)
ExecMode = NewType("ExecMode", str)
SeccompName = NewType("SeccompName", str)
Encoding = NewType("Encoding", str)
OutputFields = NewType("OutputFields", tuple[str, ...])
OnTimeout = NewType("OnTimeout", str)
WhenLeft = NewType("WhenLeft", str)
Places = NewType("Places", tuple[str, ...])
WaitTarget = NewType("WaitTarget", str)
ListLimit = NewType("ListLimit", int)
FilesLimit = NewType("FilesLimit", int)
Offset = NewType("Offset", int)
OutputBytes = NewType("OutputBytes", int)
NamedPath = NewType("NamedPath", str)
PathInWorkspace = NewType("PathInWorkspace", str)
FilePath = NewType("FilePath", str)
FileMode = NewType("FileMode", int)
Sha256 = NewType("Sha256", str)
DigestName = NewType("DigestName", str)
FileId = NewType("FileId", int)
Line = NewType("Line", int)
Edits = NewType("Edits", list[dict[str, Any]])  # JSON values
Paths = NewType("Paths", tuple[str, ...])
Depth = NewType("Depth", int)
Glob = NewType("Glob", str)
MatchLimit = NewType("MatchLimit", int)
ContextLines = NewType("ContextLines", int)
SearchedBytes = NewType("SearchedBytes", int)
ArchiveFormat = NewType("ArchiveFormat", str)
FileArchiveFormat = NewType("FileArchiveFormat", str)
WindowBytes = NewType("WindowBytes", int)
SessionId = NewType("SessionId", str)
ReadBytes = NewType("ReadBytes", int)
EventTypes = NewType("EventTypes", frozenset[EventType])
StatusFilter = NewType("StatusFilter", str)
LabelFilter = NewType("LabelFilter", str)
LabelPair = NewType("LabelPair", str)
NameCursor = NewType("NameCursor", str)
OffsetText = NewType("OffsetText", str)


@attrs.frozen
class Stdin:
    """The standard input of a command: a text and then the end, or, open, input that is sent later."""

    text: str = attrs.field(default="", repr=False)
    is_open: bool = False


def check_path(value: object) -> str:
    """Return a path of a command's directory or a rule. Raises `ValueError` saying why not."""
    text = _text(value)
    if not text or len(text.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"must have 1 to {MAX_PATH_BYTES} bytes")
    return text


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _text(value: object) -> str:
    """Check text that reaches the kernel as a C string."""
    if "\0" in _string(value):
        raise ValueError("must not contain NUL")
    return encodable(value)


def encodable(value: object) -> str:
    """Return a text that has a form in UTF-8."""
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
            raise ValueError(f"must be one of {', '.join(repr(str(each)) for each in self.offered)}")
        return text


@attrs.frozen
class CommaList:
    """A check for words of an enumeration, with commas between."""

    members: type[enum.StrEnum]

    def __call__(self, value: object) -> frozenset[object]:
        try:
            return frozenset(self.members(word.strip()) for word in _string(value).split(","))
        except ValueError:
            raise ValueError(f"must be a list, with commas, of {', '.join(self.members)}") from None


def member_of(cls: type[enum.StrEnum]) -> Callable[[object], object]:
    """Return a check for one of the words of an enumeration."""
    check = Choice(tuple(member.value for member in cls))
    return lambda value: cls(check(value))


def _stdin(value: object) -> Stdin:
    if value is True:
        return Stdin(is_open=True)
    if not isinstance(value, str):
        raise ValueError("must be a string, or true for input that is sent later")
    return Stdin(text=encodable(value))


def _words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_ARGUMENTS:
        raise ValueError(f"must be an array of at most {MAX_ARGUMENTS} strings")
    return tuple(_text(word) for word in value)


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
    """Check a signal: a number, or a name with or without SIG (signal(7))."""
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


def _fixed(_value: object) -> object:
    raise ValueError("is fixed when the session is made")


OUTPUT_FIELDS = ("output", "stdout", "stderr")
"""Fields of a result that hold output."""


def _output_fields(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or any(each not in OUTPUT_FIELDS for each in value) or len(value) > len(set(value)):
        raise ValueError(f"must be an array of some of {', '.join(map(repr, OUTPUT_FIELDS))}, each once")
    return tuple(value)


MODE = re.compile(r"[0-7]{3,4}\Z")
_ESCAPE = re.compile("\0([89a-f][0-9a-f])")


def file_path(value: object) -> str:
    """Return a path, surrogate-escaped. NUL and two hexadecimal digits stand for a byte that is not UTF-8."""
    text = _string(value)
    if len(text.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"must have at most {MAX_PATH_BYTES} bytes")
    path = _ESCAPE.sub(lambda found: chr(0xDC00 + int(found[1], 16)), text)
    if "\0" in path:
        raise ValueError("has a NUL character that is not followed by two digits from 80 to ff, in lower case")
    return path or "."


def named_path(value: object) -> str:
    """Return a path as `file_path`. The first routes for files refuse an empty one."""
    if value == "":
        raise ValueError(f"must have 1 to {MAX_PATH_BYTES} bytes")
    return file_path(value)


def path_in_workspace(value: object) -> str:
    """Return a path as `file_path`; an empty one and `/` are the workspace."""
    return TOP if value in ("", "/") else file_path(value)


def spell_path(path: str) -> str:
    """Return a surrogate-escaped path as a text that `FilePath` reads as the same path. No name holds NUL, so no other
    path has that spelling."""
    return "".join(f"\0{ord(sign) - 0xDC00:02x}" if "\udc80" <= sign <= "\udcff" else sign for sign in path)


def _paths(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_PATHS:
        raise ValueError(f"must be a list of 1 to {MAX_PATHS} paths")
    return tuple(file_path(each) for each in value)


def _file_mode(value: object) -> int:
    if not MODE.match(_string(value)):
        raise ValueError("must be 3 or 4 octal digits")
    return int(str(value), 8)


def some_text(value: object) -> str:
    """Return a text that is not empty."""
    if not value:
        raise ValueError("must not be empty")
    return encodable(value)


def edit_count(value: object) -> object:
    """Return how often a text may be there."""
    if value != "all" and (value != 1 or isinstance(value, bool)):
        raise ValueError("must be 1 or 'all'")
    return value


ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{0,200}"|\*')
one_etag = Matching(re.compile(rf"(?:{ETAG.pattern})\Z"), "must be an ETag, or *")

_ANY_EDIT: Mapping[str, Callable[[object], object]] = {"path": file_path, "if_match": one_etag}
EDITS: Mapping[str, Mapping[str, Callable[[object], object]]] = {
    "replace": {**_ANY_EDIT, "old": some_text, "new": encodable, "count": edit_count},
    "insert": {**_ANY_EDIT, "line": Between(0, 2**31), "text": encodable},
    "create": {**_ANY_EDIT, "text": encodable},
    "delete": _ANY_EDIT,
    "patch": {**_ANY_EDIT, "patch": some_text},
}
"""Fields of each kind of edit."""

MAY_LACK = frozenset({"if_match", "count"})
"""Fields of an edit that may be left out."""


def _edits(value: object) -> list[dict[str, Any]]:  # JSON values
    if not isinstance(value, list) or not 0 < len(value) <= MAX_EDITS:
        raise ValueError(f"must be a list of 1 to {MAX_EDITS} edits")
    return [_edit(each, f"edit {number}: ") for number, each in enumerate(value)]


def _edit(value: object, where: str) -> dict[str, Any]:  # JSON values
    checks = EDITS.get(str(value.get("op"))) if isinstance(value, dict) else None
    if checks is None or not isinstance(value, dict):
        raise ValueError(f"{where}must be an object whose op is one of {', '.join(EDITS)}")
    checked: dict[str, Any] = {"op": value["op"]}
    for name in checks.keys() - MAY_LACK - value.keys():
        raise ValueError(f"{where}{name} is missing")
    for name in value.keys() - {"op"}:
        if name not in checks:
            raise ValueError(f"{where}has no field {str(name)[:50]}")
        try:
            checked[name] = checks[name](value[name])
        except ValueError as error:
            raise ValueError(f"{where}{name} {error}") from None
    return checked


def _glob(value: object) -> str:
    text = _text(value)
    if len(text.encode()) > MAX_PATH_BYTES or "\0" in text:
        raise ValueError(f"must have at most {MAX_PATH_BYTES} bytes, and no NUL")
    return text


def _name_cursor(value: object) -> str:
    """Return the name behind which a page begins."""
    try:
        return os.fsdecode(base64.b64decode(_string(value), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        raise ValueError("is none of this server's") from None


def encode_cursor(name: str) -> str:
    """Return a cursor for the page behind a name."""
    return base64.urlsafe_b64encode(os.fsencode(name)).decode("ascii")


def _base64(value: object) -> bytes:
    try:
        return base64.b64decode(_string(value), validate=True)
    except binascii.Error:
        raise ValueError("must be base64") from None


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RESERVED = "__sk_"


def check_environment(value: object) -> dict[str, str]:
    """Return the variables of an environment. Raises `ValueError`."""
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of strings")
    check_names(value)
    for name, content in value.items():
        if not _VARIABLE.match(name):
            raise ValueError(f"{name[:100]!r} is not a variable name")
        if name.startswith(_RESERVED):
            raise ValueError(f"{name[:100]!r} can't be had: names that begin with {_RESERVED} belong to the runner")
        _text(content)
    if sum(len(name) + len(content.encode()) + 2 for name, content in value.items()) > MAX_ENV_BYTES:
        raise ValueError(f"must not be larger than {MAX_ENV_BYTES} bytes")
    return dict(value)


def check_names(variables: Mapping[str, object]) -> None:
    """Raise `ValueError` for too many names, before any is looked at."""
    if len(variables) > MAX_ENV_NAMES:
        raise ValueError(f"must not have more than {MAX_ENV_NAMES} names")


def _labels(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MAX_LABELS:
        raise ValueError(f"must be an object of at most {MAX_LABELS} strings")
    if any(not name or max(len(name), len(_text(text))) > MAX_LABEL_CHARS for name, text in value.items()):
        raise ValueError(f"names and values must have at most {MAX_LABEL_CHARS} characters")
    return dict(value)


TOKEN = re.compile(r"[\x21-\x7e]{1,128}\Z")
TOKEN_RULE = "must be 1 to 128 visible ASCII characters"
_ACCOUNT_NAME = r"(?:[A-Za-z_][A-Za-z0-9_.-]{0,31}|[0-9]{1,10})"
_USER = re.compile(rf"{_ACCOUNT_NAME}(?::{_ACCOUNT_NAME})?\Z")

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
    StopGrace: Between(*STOP_GRACE_BOUNDS_MS),
    MemoryInodes: Between(*FIXED_BOUNDS["tmp_inodes"]),
    Fixed: _fixed,
    Token: Matching(TOKEN, TOKEN_RULE),
    WorkspaceId: Matching(WORKSPACE_ID, "must be 2 to 64 of a-z, 0-9, '.', '_', '-', no sign at either end"),
    WorkspaceModeName: Choice(("shared", "exclusive")),
    Text: _text,
    Path: check_path,
    Base64: _base64,
    Environment: check_environment,
    Labels: _labels,
    Shell: Choice(("bash", "sh")),
    ShellName: Matching(
        SHELL_NAME, "must be 1 to 32 of A-Z, a-z, 0-9, '.', '_', '-', and begin with none of these signs"
    ),
    ExecId: Matching(EXEC_ID, TOKEN_RULE),
    User: Matching(_USER, "must be USER or USER:GROUP, each a name or a number"),
    Account: Matching(ACCOUNT, ACCOUNT_RULE),
    Stdin: _stdin,
    Argv: _argv,
    Words: _words,
    Places: _places,
    Cells: Between(1, MAX_CELLS),
    SignalNumber: _signal_number,
    PortNumber: Between(1, 65_535),
    Pattern: _pattern,
    WaitTarget: Choice(("exit",)),
    ExecMode: Choice(("stateful", "stateless")),
    SeccompName: Matching(SECCOMP_NAME, "must be the name of a system call filter, such as strict or debug"),
    Encoding: Choice(("utf-8", "base64")),
    OutputFields: _output_fields,
    OnTimeout: Choice(("error", "result")),
    WhenLeft: Choice(("cancel", "detach")),
    ListLimit: Between(1, MAX_LIST),
    FilesLimit: Between(1, MAX_FILES),
    Offset: Between(0, 2**53),
    OutputBytes: Between(1, MAX_OUTPUT_BYTES),
    NamedPath: named_path,
    PathInWorkspace: path_in_workspace,
    FilePath: file_path,
    FileMode: _file_mode,
    Sha256: Matching(re.compile(r"[0-9a-f]{64}\Z"), "must be 64 hexadecimal digits in lower case"),
    DigestName: Choice(("sha256",)),
    FileId: Between(-1, MAX_FILE_ID),
    Line: Between(1, 2**31),
    Edits: _edits,
    Paths: _paths,
    Depth: Between(1, MAX_DEPTH),
    Glob: _glob,
    MatchLimit: Between(1, MAX_MATCHES),
    ContextLines: Between(0, MAX_CONTEXT),
    SearchedBytes: Between(1, MAX_SEARCHED_BYTES),
    ArchiveFormat: Choice(("tar", "tar.zst")),
    FileArchiveFormat: Choice(("tar", "tar.zst", "zip")),
    WindowBytes: Between(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES),
    SessionId: Matching(SESSION_ID, "must be 16 to 32 hexadecimal digits in lower case"),
    ReadBytes: Between(1, 2**53),
    EventTypes: CommaList(EventType),
    StatusFilter: Choice((*Status, "all")),
    LabelFilter: Matching(re.compile("[^=]"), "must be NAME or NAME=VALUE"),
    LabelPair: Matching(re.compile("[^=]+="), "must be NAME=VALUE"),
    NameCursor: _name_cursor,
    OffsetText: Matching(re.compile(r"[0-9]{1,16}\Z"), "must be a number of bytes"),
    Stream: member_of(Stream),
    StreamsMode: member_of(StreamsMode),
    ExecKind: member_of(ExecKind),
    ExecState: member_of(ExecState),
}


def check_of(kind: object) -> Callable[[object], object] | None:
    """Return the check of a kind of field; None for any other type."""
    return _CHECKS.get(kind)


def add_kinds(checks: Mapping[Any, Callable[[object], object]]) -> None:  # keys: types and NewTypes
    """Add the kinds of field of another module, before any of its classes is read."""
    _CHECKS.update(checks)
    for kind, check in checks.items():
        _converter.register_structure_hook(kind, _hook(check))


def _hook(check: Callable[[object], object]) -> Callable[[object, type], object]:
    return lambda value, _type: check(value)


def _object_hook(cls: type) -> Callable[[object, type], object]:
    """Return what makes a `cls` of an object. The field `for_` is named `for` there, and `cls.aliases` has further
    names of fields. With `cls.short` a string stands for an object with that field alone."""
    names = {field.name: override(rename=field.name[:-1]) for field in attrs.fields(cls) if field.name.endswith("_")}
    fields: Callable[[Mapping[str, Any], type], object]  # Any: JSON
    fields = make_dict_structure_fn(cls, _converter, **names)  # type: ignore[arg-type]
    aliases = _aliases(cls)
    short: str | None = getattr(cls, "short", None)
    check = None if short is None else check_of(plain_kind(get_type_hints(cls)[short]))

    def structure(value: object, _type: type) -> object:
        if short is not None and check is not None and isinstance(value, str):
            return cls(**{short: check(value)})
        if not isinstance(value, dict):  # a string would pass: "mode" is in "mode", and no field would be found
            raise ValueError("must be an object")
        for alias in aliases.keys() & value.keys():
            name = aliases[alias]
            if name in value:
                raise ValueError(f"must not have both {alias} and {name}, which mean the same")
            value = {**value, name: value[alias]}
        return fields(value, cls)

    return structure


_converter = cattrs.Converter(detailed_validation=True)
_converter.register_structure_hook_factory(attrs.has, _object_hook)
add_kinds(_CHECKS)


# Bodies ---------------------------------------------------------------------------------------------------------------


async def read_request(exchange: Exchange, cls: type[T], *, limit_bytes: int | None = None) -> T:
    """Return the request in the exchange's JSON body, and tell the exchange which of the fields are ignored.

    Raises:
        InvalidRequest: as `parse`; a field is unknown to a strict class.
        TooLarge, InvalidRequest, ClientGone: as `Exchange.read_json_body`.
    """
    value = decode_object(await exchange.read_json_body(limit_bytes=limit_bytes))
    if is_strict(cls):
        refuse_unknown(value, cls, "request")
    request = parse(value, cls)
    exchange.ignore(ignored_fields(value, cls))
    return request


def is_strict(cls: type) -> bool:
    """Return whether a body with other fields than those of `cls` is refused."""
    return getattr(cls, "strict", False)


def parse(value: Mapping[str, Any], cls: type[T]) -> T:  # Any: JSON
    """Return the request in a JSON object.

    Raises:
        InvalidRequest: `details` maps the path of each bad field to what is wrong with it.
    """
    return _structure(value, cls, "the request")


def ignored_fields(value: Mapping[str, Any], cls: type, above: str = "") -> Sequence[str]:  # Any: JSON
    """Return the paths of the fields of an object that `cls` has no name for."""
    inner = _fields_of(cls)
    if inner.keys() >= value.keys() and not any(inner[name] for name in value):
        return ()
    found = []
    for name, field in value.items():
        if name not in inner:
            found.append(above + name)
        elif (kind := inner[name]) is not None and isinstance(field, dict):
            found += ignored_fields(field, kind, f"{above}{name}.")
    return found


@functools.cache
def _fields_of(cls: type) -> Mapping[str, type | None]:
    """Return the names of a class's fields in JSON, each with the class of a field that is an object of fields."""
    kinds = {name: plain_kind(kind) for name, kind in _hints(cls)}
    inner = {
        name.removesuffix("_"): kind if check_of(kind) is None and isinstance(kind, type) and attrs.has(kind) else None
        for name, kind in kinds.items()
    }
    return {**inner, **dict.fromkeys(_aliases(cls))}


def _aliases(cls: type) -> Mapping[str, str]:
    """Return the other names that a class's `aliases` gives to its fields."""
    return getattr(cls, "aliases", {})


def _structure(value: Mapping[str, Any], cls: type[T], what: str) -> T:  # Any: JSON
    try:
        return _converter.structure(value, cls)
    except cattrs.BaseValidationError as error:
        problems = (line.rpartition(" @ $.") for line in cattrs.transform_error(error, format_exception=_describe))
        details = {path.partition("[")[0].removesuffix("_"): problem for problem, _, path in problems}
        raise InvalidRequest(f"{what} has bad fields", **details) from None


def bad_fields(**problems: str) -> InvalidRequest:
    """Return the refusal of a request that names each bad field."""
    return InvalidRequest("the request has bad fields", **problems)


def _describe(error: BaseException, _type: type | None) -> str:
    if isinstance(error, KeyError):
        return "is required"
    return str(error) if isinstance(error, ValueError) else "has the wrong type"


# Queries and heads ----------------------------------------------------------------------------------------------------


def read_query(exchange: Exchange, cls: type[T]) -> T:
    """Return the exchange's query; raises as `parse` and `Exchange.query`."""
    repeated = {name: exchange.query_all(name) for name in _repeated(cls) if name in exchange.query}  # type: ignore[arg-type]  # a class is hashable
    return _structure({**_query_values(exchange.query, cls), **repeated}, cls, "the query")


def parse_known_query(query: Mapping[str, str], cls: type[T]) -> T:
    """Return a query without repeated fields, all of them known; raises as `parse`."""
    refuse_unknown(query, cls)
    return _structure(_query_values(query, cls), cls, "the query")


def read_head(exchange: Exchange, cls: type[T]) -> T:
    """Return the headers that have the names of the fields of `cls`, repeated ones as lists; raises as `parse`."""
    given = ((field.name, exchange.header_list(field.name.replace("_", "-").encode())) for field in attrs.fields(cls))  # type: ignore[arg-type]  # an attrs class
    return _structure({name: value for name, value in given if value is not None}, cls, "the request's head")


def _query_values(query: Mapping[str, str], cls: type) -> dict[str, object]:
    """Return a query with the numbers and flags of `cls` as such, where they are spelled as one."""
    values: dict[str, object] = dict(query)
    for name, check in _not_text(cls).items():
        text = query.get(name)
        if text is None:
            continue
        if check is _boolean and text in ("true", "false"):
            values[name] = text == "true"
        elif check is not _boolean and text.isascii() and text.isdigit() and len(text) < 18:
            values[name] = int(text)
    return values


def refuse_unknown(names: Iterable[str], cls: type | None, what: str = "query") -> None:
    """Refuse fields that `cls`, which reads the query or the request, does not have.

    Raises:
        InvalidRequest: `details` name the nearest known field.
    """
    known: Collection[str] = () if cls is None else _fields_of(cls)
    problems = {}
    for name in [each[:_MAX_NAME_CHARS] for each in names if each not in known][:_MOST_UNKNOWN]:
        near = difflib.get_close_matches(name, known, 1, 0)
        problems[name] = f"is unknown; the nearest known field is {near[0]}" if near else _NONE
    if problems:
        raise InvalidRequest(f"the {what} has bad fields", **problems)


def bad_query(name: str, problem: str) -> InvalidRequest:
    """Return the refusal of one field."""
    return InvalidRequest("the query has bad fields", **{name: problem})


def plain_kind(kind: object) -> object:
    """Return the kind of a field that may be None without the None."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(member for member in get_args(kind) if member is not type(None))
    return kind


@functools.cache
def _not_text(cls: type) -> Mapping[str, Callable[[object], object]]:
    """Return the checks of a query's fields that are numbers or flags."""
    checks = [(name.removesuffix("_"), check_of(plain_kind(kind))) for name, kind in _hints(cls)]
    return {name: check for name, check in checks if check == _boolean or isinstance(check, Between)}


@functools.cache
def _repeated(cls: type) -> Sequence[str]:
    """Return the names of a query's fields that may come more than once."""
    return [name for name, kind in _hints(cls) if get_origin(plain_kind(kind)) is tuple]


def _hints(cls: type) -> list[tuple[str, object]]:
    hints = get_type_hints(cls)
    return [(field.name, hints[field.name]) for field in attrs.fields(cls)]
