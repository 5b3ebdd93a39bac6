"""Sources of settings: a YAML file, then the environment, then the command line; later ones win.

Owns key names, their environment names, older spellings and the wording of mistakes. An unknown key is an error that
names the nearest known one, so a misspelt limit is never silently the default. `values.py` checks the values.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from sandkasten.config import Config, ConfigError
from sandkasten.installation import ENV_FILE, refuse_writable

T = TypeVar("T")

ENV_PREFIX = "SANDKASTEN_"
OLDER_SPELLINGS = {
    "limits.cpu_quota": "defaults.cpu_limit",
    "limits.mem_limit_mb": "defaults.mem_limit_mb",
    "limits.pids_limit": "defaults.pids_limit",
    "limits.max_exec_timeout_ms": "defaults.max_exec_timeout_ms",
    "network.mode": "defaults.network_mode",
}
_PLAIN_SECTIONS = {"defaults", "security", "testing"}
"""Sections left out of environment names: `SANDKASTEN_CPU_LIMIT`."""
_TYPO = 0.75
"""Least likeness of an unknown `SANDKASTEN_*` variable to a known one that counts as a mistake: container engines and
clients set variables with this prefix, too.
"""


def _keys(section: type = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type expression) of every setting."""
    hints = typing.get_type_hints(section)
    for name in attrs.fields_dict(section):
        if attrs.has(hints[name]):
            yield from _keys(hints[name], f"{name}.")
        else:
            yield prefix + name, hints[name]


KEYS: Mapping[str, Any] = dict(_keys())


def env_name(key: str) -> str:
    """Return the environment variable of a dotted key."""
    section, _, leaf = key.rpartition(".")
    return ENV_PREFIX + (leaf if not section or section in _PLAIN_SECTIONS else f"{section}_{leaf}").upper()


def load_config(
    path: Path | None = None, *, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None
) -> Config:
    """Merge file, environment and overrides (by dotted key; None means not given) into a `Config`.

    Raises:
        ConfigError: a file that can't be read or that others may write, an unknown key, or a value that does not fit.
    """
    problems: list[str] = []
    given = _from_file(path, problems) if path is not None else {}
    given |= _from_environment(environ, problems)
    given |= {key: value for key, value in (overrides or {}).items() if value is not None}
    values = {}
    for key, raw in given.items():
        try:
            values[key] = _parse(raw, KEYS[key])
        except ValueError as error:
            problems.append(f"{key}: {error}")
    config = _build(values, problems)
    if config is None or problems:
        raise ConfigError("\n".join(problems))
    return config


def _build(values: Mapping[str, object], problems: list[str]) -> Config | None:
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        sections.setdefault(section, {})[leaf] = value
    hints = typing.get_type_hints(Config)
    top = sections.pop("", {})
    made = {name: _made(hints[name], fields, f"{name}.", problems) for name, fields in sections.items()}
    # Beside a section that is left out as wrong, others could seem to contradict it.
    return _made(Config, top if problems else top | made, "", problems)


def _made(section: Callable[..., T], fields: Mapping[str, object], prefix: str, problems: list[str]) -> T | None:
    """Return a section with these fields. None: `problems` has every field that is wrong by itself, or else how they
    contradict each other."""
    try:
        return section(**fields)
    except ValueError as error:
        together = str(error)
    alone = []
    for name, value in fields.items():
        try:
            section(**{name: value})
        except ValueError as error:
            alone.append(f"{prefix}{error}")
    problems += alone or [prefix + together]
    return None


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, object]:
    names = {env_name(key): key for key in KEYS}
    given: dict[str, object] = {}
    for name, value in environ.items():
        if name in names and value:
            given[names[name]] = value
        elif name.startswith(ENV_PREFIX) and name not in names and name != ENV_FILE:
            known = [each.removeprefix(ENV_PREFIX) for each in names]
            near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), known, 1, _TYPO)
            if near:
                problems.append(f"unknown variable {name}; the nearest known one is {ENV_PREFIX}{near[0]}")
    return given


def _from_file(path: Path, problems: list[str]) -> dict[str, object]:
    tree = read_yaml(path)
    given: dict[str, object] = {}
    for key, value in _flatten(tree):
        known = OLDER_SPELLINGS.get(key, key)
        if known not in KEYS:
            problems.append(f"unknown key {key!r}; the nearest known one is {_nearest(key)!r}")
        elif known in given:
            problems.append(f"{known} is given twice (once as {key})")
        else:
            given[known] = value
    return given


def _nearest(key: str) -> str:
    """Return the known key most like `key`, by its full name or by its last part."""

    def likeness(known: str) -> float:
        pairs = ((key, known), (key.rpartition(".")[2], known.rpartition(".")[2]))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    return max(KEYS, key=likeness)


def _flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in KEYS:
            yield from _flatten(value, f"{key}.")
        elif value is not None:  # a key without a value keeps its default
            yield key, value


def read_yaml(path: Path, *, is_shipped: bool = False) -> dict[str, object]:
    """Return the mapping of a YAML file. Others may not write the file, unless it `is_shipped` beside the code.

    Raises:
        ConfigError: the file can't be read, others may write it, or it is no mapping of YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe loader that refuses a key given twice, which YAML forbids and PyYAML lets pass."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise ConfigError(f"{path}: {name!r} is given twice")
            return super().construct_mapping(node, deep)

    try:
        with path.open("rb") as file:
            if not is_shipped:
                refuse_writable(path, file.fileno())
            tree = yaml.load(file, Loader)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping of keys to values")
    return tree


def _parse(raw: object, expected: Any) -> object:  # `expected` is a type expression
    """Turn a YAML value, or a string from environment or command line, into the annotated type."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return _parse(raw, arguments[0])
    if origin is Literal:
        return "off" if raw is False else str(raw)  # YAML 1.1 reads a bare `off` as a boolean
    if origin is tuple:
        items = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(items, list):
            raise ValueError("expected a list")
        return tuple("off" if item is False else str(item).strip() for item in items if str(item).strip())
    if origin is not None:
        return _parse_mapping(raw, arguments[1])
    if attrs.has(expected):
        return _parse_fields(raw, expected)
    if expected is bool:
        return _parse_bool(raw)
    if expected is str or expected is Path:
        if not isinstance(raw, str | Path):
            raise ValueError(f"expected text, not {raw!r}")
        return str(raw).strip() if expected is str else Path(raw)
    if isinstance(raw, bool) or (expected is int and isinstance(raw, float)):
        raise ValueError(f"expected a number, not {raw!r}")
    try:
        return expected(raw)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, not {raw!r}") from None


def _parse_bool(raw: object) -> bool:
    word = str(raw).lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError(f"expected true or false, not {raw!r}")


def _parse_fields(raw: object, expected: Any) -> object:  # an attrs class
    """Return an object of a mapping of its fields; a single value is that of the first field."""
    hints = typing.get_type_hints(expected)
    given = raw if isinstance(raw, dict) else {next(iter(hints)): raw}
    unknown = [str(name) for name in given if name not in hints]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; there are {', '.join(hints)}")
    try:
        return expected(**{name: _parse(value, hints[name]) for name, value in given.items() if value is not None})
    except TypeError:
        raise ValueError(f"{next(iter(hints))} is missing") from None


def _parse_mapping(raw: object, item: type) -> dict[str, object]:
    if isinstance(raw, str):
        raw = dict(pair.partition("=")[::2] for pair in raw.split(",") if pair)
    if not isinstance(raw, dict):
        raise ValueError("expected a mapping")
    return {str(name): _parse(value, item) for name, value in raw.items()}
