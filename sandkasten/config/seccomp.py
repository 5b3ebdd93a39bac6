"""An operator's own system call filters: JSON files in the OCI format, made into the rules that nsinit compiles.

Owns the format. An unsupported part is refused, with the file and the place in the message; no part is skipped. nsinit
says at its start which calls exist, which arguments can be compared and what no profile may allow. Rules for
capabilities are dropped (no command has one), and so are those for other architectures and newer kernels.

Sources: the OCI runtime specification, config-linux.md "Seccomp"; the default profile of Moby for `includes`.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from nsinit.wire.protocol import MAX_DATAGRAM_BYTES, REQUESTS, SeccompArgTest, SeccompProfile, SeccompRule, Start
from sandkasten.config import ConfigError, SecuritySettings
from sandkasten.model import SECCOMP_NAME, SECCOMP_PROFILES

MAX_FILE_BYTES = 256 * 1024
_ROOM_BYTES = MAX_DATAGRAM_BYTES - 8192
"""Most bytes that all profiles together take in the message that starts nsinit."""

_ACTIONS = {
    "SCMP_ACT_ALLOW": "allow",
    "SCMP_ACT_LOG": "log",
    "SCMP_ACT_ERRNO": "errno",
    "SCMP_ACT_TRAP": "trap",
    "SCMP_ACT_KILL": "kill_thread",
    "SCMP_ACT_KILL_THREAD": "kill_thread",
    "SCMP_ACT_KILL_PROCESS": "kill_process",
}
_COMPARISONS = {f"SCMP_CMP_{op.upper()}": op for op in ("ne", "lt", "le", "eq", "ge", "gt", "masked_eq")}
_ARCH_NAME = re.compile(r"SCMP_ARCH_[A-Z0-9_]+\Z")
_KERNEL = re.compile(r"(\d+)\.(\d+)")
_NATIVE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())

_TOP_KEYS = {"defaultAction", "defaultErrnoRet", "defaultErrno", "architectures", "archMap", "syscalls"}
_RULE_KEYS = {"name", "names", "action", "errnoRet", "errno", "args", "comment", "includes", "excludes"}
_ARG_KEYS = {"index", "value", "valueTwo", "op"}
_CONDITION_KEYS = {"caps", "arches", "minKernel"}

Json = Mapping[str, Any]  # JSON values


def load_filters(security: SecuritySettings) -> tuple[SeccompProfile, ...]:
    """Return the operator's own filters. Raises `ConfigError`, also for a configured name without a file."""
    profiles = load_profiles(security.seccomp_profiles)
    known = {*SECCOMP_PROFILES, *(profile.name for profile in profiles)}
    for name in (security.seccomp, *security.seccomp_allowed):
        if name not in known:
            raise ConfigError(f"security.seccomp: there is no {name}.json in {security.seccomp_profiles}")
    return profiles


def load_profiles(directory: Path | None) -> tuple[SeccompProfile, ...]:
    """Return the profiles of a directory, by the names of its `*.json` files.

    Raises:
        ConfigError: the directory or a file can't be read or trusted, or is no profile that can be kept.
    """
    if directory is None:
        return ()
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"security.seccomp_profiles: can't read {directory}: {error.strerror}") from None
    profiles = tuple(_load(path) for path in paths if path.suffix == ".json")
    if len(REQUESTS.encode(Start(0, "", "", seccomp_profiles=profiles))) > _ROOM_BYTES:
        raise ConfigError(f"security.seccomp_profiles: the profiles in {directory} are too large together")
    return profiles


def _load(path: Path) -> SeccompProfile:
    if path.stem in SECCOMP_PROFILES or not SECCOMP_NAME.match(path.stem):
        raise ConfigError(f"{path}: a profile needs a name of its own: 1 to 32 of a-z 0-9 _ - (begins a-z 0-9)")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"{path} must be a file that only its owner may write")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse_profile(path.stem, data)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_profile(name: str, data: bytes) -> SeccompProfile:
    """Return the profile in a JSON text. Raises `ValueError` with the place and the fault."""
    try:
        tree = json.loads(data, object_pairs_hook=_no_doubles)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    top = _object(tree, "profile", _TOP_KEYS)
    _check_architectures(top)
    rules = []
    for number, entry in enumerate(_list(top.get("syscalls"), "syscalls")):
        where = f"syscalls[{number}]"
        rule = _object(entry, where, _RULE_KEYS)
        if _applies(rule, where):
            rules.append(_rule(rule, where))
    default_errno = _errno(top, "defaultErrnoRet", "defaultErrno", "profile")
    return SeccompProfile(name, _action(top.get("defaultAction"), "defaultAction"), tuple(rules), default_errno)


def _rule(rule: Json, where: str) -> SeccompRule:
    names = [rule["name"]] if "name" in rule else _list(rule.get("names"), f"{where}.names")
    if "name" in rule and "names" in rule:
        raise ValueError(f"{where}: name and names exclude each other")
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}.names: expected text")
    args = _list(rule.get("args"), f"{where}.args")
    return SeccompRule(
        tuple(names),
        _action(rule.get("action"), f"{where}.action"),
        _errno(rule, "errnoRet", "errno", where),
        tuple(
            _test(_object(arg, f"{where}.args[{at}]", _ARG_KEYS), f"{where}.args[{at}]") for at, arg in enumerate(args)
        ),
    )


def _test(arg: Json, where: str) -> SeccompArgTest:
    index, value, second = (_integer(arg.get(key, 0), f"{where}.{key}") for key in ("index", "value", "valueTwo"))
    op = _COMPARISONS.get(str(arg.get("op")))
    if op is None:
        raise ValueError(f"{where}.op must be one of {', '.join(_COMPARISONS)}")
    if op == "masked_eq":
        return SeccompArgTest(index, "masked_eq", second, mask=value)
    if second:
        raise ValueError(f"{where}.valueTwo goes with SCMP_CMP_MASKED_EQ alone")
    return SeccompArgTest(index, cast(Any, op), value)


def _applies(rule: Json, where: str) -> bool:
    """Whether a rule is for sandboxes of this machine, which have no capability."""
    includes = _object(rule.get("includes") or {}, f"{where}.includes", _CONDITION_KEYS)
    excludes = _object(rule.get("excludes") or {}, f"{where}.excludes", _CONDITION_KEYS)
    if _list(includes.get("caps"), f"{where}.includes.caps"):
        return False
    _list(excludes.get("caps"), f"{where}.excludes.caps")
    wanted, unwanted = (_list(each.get("arches"), f"{where}: arches") for each in (includes, excludes))
    if (wanted and _NATIVE not in wanted) or _NATIVE in unwanted:
        return False
    is_new_enough = _is_kernel(includes.get("minKernel", "0.0"), where)
    return is_new_enough and not ("minKernel" in excludes and _is_kernel(excludes["minKernel"], where))


def _is_kernel(least: object, where: str) -> bool:
    asked, here = _KERNEL.match(str(least)), _KERNEL.match(platform.release())
    if asked is None or here is None:
        raise ValueError(f"{where}: minKernel must be a version such as 4.8")
    return tuple(map(int, here.groups())) >= tuple(map(int, asked.groups()))


def _check_architectures(top: Json) -> None:
    """Check the names of architectures, and no more: a call of a foreign architecture always kills."""
    names = list(_list(top.get("architectures"), "architectures"))
    for number, entry in enumerate(_list(top.get("archMap"), "archMap")):
        where = f"archMap[{number}]"
        mapped = _object(entry, where, {"architecture", "subArchitectures"})
        names += [mapped.get("architecture"), *_list(mapped.get("subArchitectures"), where)]
    for name in names:
        if not isinstance(name, str) or not _ARCH_NAME.match(name):
            raise ValueError(f"architectures: {name!r} is none")


def _action(value: object, where: str) -> Any:  # one of the literals of `SeccompRule.action`
    action = _ACTIONS.get(str(value))
    if action is None:
        raise ValueError(f"{where} must be one of {', '.join(_ACTIONS)}, not {str(value)[:40]!r}")
    return action


def _errno(entry: Json, number_key: str, name_key: str, where: str) -> int:
    number = entry.get(number_key)
    if number is not None:
        return _integer(number, f"{where}.{number_key}")
    name = entry.get(name_key)
    if name is None:
        return errno.EPERM
    found = getattr(errno, name, None) if isinstance(name, str) and re.fullmatch("E[A-Z0-9]+", name) else None
    if not isinstance(found, int):
        raise ValueError(f"{where}.{name_key}: {str(name)[:40]!r} is no errno")
    return found


def _integer(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError(f"{where} must be a number from 0 to 2^64-1")
    return value


def _object(value: object, where: str, known: set[str]) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    if unknown := sorted(value.keys() - known):
        raise ValueError(f"{where}: {unknown[0][:40]!r} is not supported")
    return value


def _list(value: object, where: str) -> Sequence[Any]:  # JSON values
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where} must be a list")
    return value or ()


def _no_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found
