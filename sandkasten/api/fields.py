"""The kinds of field that request bodies are made of: one named type and one check each, and the strict converter.

Values keep their JSON type (no "1" for 1, no true for 1). A check returns the value or raises `ValueError` with what
the client reads. Knows no request.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Any, NewType

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn

from sandkasten.model import LIMIT_BOUNDS, WORKSPACE_ID

MAX_TTL_S = 86_400
MAX_PATH_BYTES = 4096
MAX_ENV_BYTES = 128 * 1024
MAX_LABELS = 64
MAX_LABEL_CHARS = 256

Ttl = NewType("Ttl", int)
Lifetime = NewType("Lifetime", int)
Milliseconds = NewType("Milliseconds", int)
Cores = NewType("Cores", float)
MemoryMegabytes = NewType("MemoryMegabytes", int)
DiskMegabytes = NewType("DiskMegabytes", int)
Pids = NewType("Pids", int)
Token = NewType("Token", str)
WorkspaceId = NewType("WorkspaceId", str)
Text = NewType("Text", str)
Path = NewType("Path", str)
Base64 = NewType("Base64", bytes)
Environment = NewType("Environment", dict[str, str])
Labels = NewType("Labels", dict[str, str])
Shell = NewType("Shell", str)
NamedShell = NewType("NamedShell", str)
NetworkMode = NewType("NetworkMode", str)
ExecMode = NewType("ExecMode", str)
Encoding = NewType("Encoding", str)
OnTimeout = NewType("OnTimeout", str)
OnDisconnect = NewType("OnDisconnect", str)
NoHosts = NewType("NoHosts", list[str])
NotOffered = NewType("NotOffered", object)


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
    text = _string(value)
    if "\0" in text:
        raise ValueError("must not contain NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not contain lone surrogates") from None
    return text


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _integer(low: float, high: float) -> Callable[[object], int]:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError("must be an integer")
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}")
        return value

    return check


def _cores(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("must be a number")
    low, high = LIMIT_BOUNDS["cpu"]
    if not low <= value <= high:
        raise ValueError(f"must be between {low} and {high}")
    return float(value)


def _matching(pattern: re.Pattern[str], rule: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not pattern.match(_string(value)):
            raise ValueError(rule)
        return str(value)

    return check


def _choice(*offered: str, not_offered: tuple[str, ...] = ()) -> Callable[[object], str]:
    def check(value: object) -> str:
        text = _string(value)
        if text in not_offered:
            raise ValueError(f"{text!r} is not available on this server")
        if text not in offered:
            raise ValueError(f"must be one of {', '.join(map(repr, offered))}")
        return text

    return check


def _named_shell(value: object) -> str:
    if _string(value) != "default":
        raise ValueError("named shells other than 'default' are not available on this server")
    return "default"


def _no_hosts(value: object) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("must be an array")
    if value:
        raise ValueError("no host can be reached on this server; only an empty array is accepted")
    return []


def _not_offered(_value: object) -> object:
    raise ValueError("is not available on this server")


def _base64(value: object) -> bytes:
    try:
        return base64.b64decode(_string(value), validate=True)
    except binascii.Error:
        raise ValueError("must be base64") from None


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of strings")
    for name, content in value.items():
        if not _VARIABLE.match(name):
            raise ValueError(f"{name[:100]!r} is not a variable name")
        _text(content)
    if sum(len(name) + len(content.encode()) + 2 for name, content in value.items()) > MAX_ENV_BYTES:
        raise ValueError(f"must not be larger than {MAX_ENV_BYTES} bytes")
    return dict(value)


def _labels(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MAX_LABELS:
        raise ValueError(f"must be an object of at most {MAX_LABELS} strings")
    if any(not name or max(len(name), len(_text(text))) > MAX_LABEL_CHARS for name, text in value.items()):
        raise ValueError(f"names and values must have at most {MAX_LABEL_CHARS} characters")
    return dict(value)


TOKEN = re.compile(r"[\x21-\x7e]{1,128}\Z")
TOKEN_RULE = "must be 1 to 128 visible ASCII characters"


_CHECKS: dict[Any, Callable[[object], object]] = {  # keys: types and NewTypes
    str: _string,
    bool: _boolean,
    int: _integer(-(2**53), 2**53),
    Ttl: _integer(0, MAX_TTL_S),
    Lifetime: _integer(1, 366 * 86_400),
    Milliseconds: _integer(0, 2**53),
    Cores: _cores,
    MemoryMegabytes: _integer(*LIMIT_BOUNDS["memory_mb"]),
    DiskMegabytes: _integer(*LIMIT_BOUNDS["disk_mb"]),
    Pids: _integer(*LIMIT_BOUNDS["pids"]),
    Token: _matching(TOKEN, TOKEN_RULE),
    WorkspaceId: _matching(WORKSPACE_ID, "must be 2 to 64 of a-z, 0-9, '.', '_', '-', no sign at either end"),
    Text: _text,
    Path: check_path,
    Base64: _base64,
    Environment: _environment,
    Labels: _labels,
    Shell: _choice("bash", "sh"),
    NamedShell: _named_shell,
    NetworkMode: _choice("none", not_offered=("proxy", "bridge", "host")),
    ExecMode: _choice("stateful", not_offered=("stateless",)),
    Encoding: _choice("utf-8", "base64"),
    OnTimeout: _choice("error", "result"),
    OnDisconnect: _choice("cancel", not_offered=("detach",)),
    NoHosts: _no_hosts,
    NotOffered: _not_offered,
}


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
    fields: Callable[[Mapping[str, Any], type], object] = make_dict_structure_fn(cls, converter)  # Any: JSON

    def structure(value: object, _type: type) -> object:
        if not isinstance(value, dict):  # a string would pass: "mode" is in "mode", and no field would be found
            raise ValueError("must be an object")
        return fields(value, cls)

    return structure
