"""API keys on disk: the configured key's file, and `sandkasten key create | list | revoke`.

`with_key` makes the first key, once, in a file that the daemon's user and root alone can read. The subcommand works on
the file of further keys directly, with or without a daemon; a running daemon sees the change within a second. The token
of a new key is printed on stdout once; only its digest is kept.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs

from sandkasten.admission.keys import MAX_KEYS, KeyFileError, locked_for_change, read_keys, write_keys
from sandkasten.cli.common import Stop, load_installed, make_data_dir, span_seconds
from sandkasten.cli.output import print_json
from sandkasten.config import Config
from sandkasten.host.paths import DataPaths
from sandkasten.model.keys import KEY_ID, KEY_NAME, Access, ApiKey, Label, Quota, digest_of, make_token
from sandkasten.model.network import NetworkMode

_BYTES = 32
_LABEL = re.compile(r"([^=]{1,128})=(.{0,1024})\Z")
QUOTAS = {
    "max_sessions": "sessions",
    "max_cpu": "cpu",
    "max_memory_mb": "memory_mb",
    "max_disk_mb": "disk_mb",
    "max_execs": "execs",
    "creates_per_minute": "creates_per_minute",
    "requests_per_second": "requests_per_second",
}
"""Options of `create` and the fields of `Quota` they set."""

# The first key


def with_key(config: Config) -> Config:
    """Return `config` with a key: its own, or the one in the data directory, which is made if there is none."""
    if config.api_key is not None:
        return config
    make_data_dir(config.data_dir)
    path = config.api_key_path
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _with(config, _read(path))
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)
        key = secrets.token_urlsafe(_BYTES)
        file.write(f"{key}\n")
    return _with(config, key)


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, encoding="ascii", errors="replace") as file:
        if os.fstat(fd).st_mode & 0o077:
            raise Stop(f"other users may read {path}; chmod 600 it, or delete it to get a new key")
        return file.read().strip()


def _with(config: Config, key: str) -> Config:
    try:
        return attrs.evolve(config, api_key=key, db_path=config.db_path)
    except ValueError as error:
        raise Stop(f"{config.api_key_path}: {error}") from None


# sandkasten key


def run(arguments: argparse.Namespace) -> int:
    """Perform one action and return its exit status."""
    path = DataPaths(load_installed(arguments).data_dir).keys
    try:
        match arguments.action:
            case "list":
                return _list(path, as_json=arguments.json)
            case "revoke":
                return _revoke(path, arguments.key, as_json=arguments.json)
            case _:
                return _create(path, arguments)
    except KeyFileError as error:
        raise Stop(f"{path}: {error}") from None
    except PermissionError as error:
        raise Stop(f"{error.filename or path}: {error.strerror}; run this with sudo, or as the daemon's user") from None
    except OSError as error:
        raise Stop(f"{error.filename or path}: {error.strerror}") from None


def _create(path: Path, arguments: argparse.Namespace) -> int:
    key_id, token = make_token()
    now = datetime.now(UTC)
    key = _asked_for(key_id, token, arguments, now)
    with locked_for_change(path):
        keys = read_keys(path)
        if any(each.name == key.name for each in keys):
            raise Stop(f"there is a key {key.name!r}; names tell keys apart, and `key revoke` takes one")
        if len(keys) >= MAX_KEYS:
            raise Stop(f"there are {MAX_KEYS} keys, which is all there may be")
        write_keys(path, [*keys, key])
    print(f"key {key.id} ({key.name}) is made; this is shown once:", file=sys.stderr)
    if arguments.json:
        print_json(_shown(key, now) | {"token": token})
    else:
        print(token, flush=True)
    return 0


def _asked_for(key_id: str, token: str, arguments: argparse.Namespace, now: datetime) -> ApiKey:
    if not KEY_NAME.match(arguments.name) or KEY_ID.match(arguments.name):
        raise Stop("--name: letters, digits and . _ @ -, at most 64, and not the form of an id")
    try:
        return ApiKey(
            key_id,
            arguments.name,
            Access.ADMIN if arguments.admin else Access.READ if arguments.read_only else Access.WRITE,
            label=None if arguments.label is None else _label(arguments.label),
            quota=Quota(**{name: getattr(arguments, option) for option, name in QUOTAS.items()}),
            created_at=now,
            expires_at=None if arguments.expires is None else now + _span(arguments.expires),
            digest=digest_of(token.encode()),
            max_network=None if arguments.max_network is None else NetworkMode(arguments.max_network),
        )
    except OverflowError:
        raise Stop("--expires: that is after the year 9999") from None
    except ValueError as error:
        raise Stop(str(error)) from None


def _label(text: str) -> Label:
    match = _LABEL.match(text)
    if match is None:
        raise ValueError("--label: NAME=VALUE")
    return Label(match[1], match[2])


def _span(text: str) -> timedelta:
    try:
        return timedelta(seconds=span_seconds(text))
    except ValueError as error:
        raise ValueError(f"--expires: {error}") from None


def _list(path: Path, *, as_json: bool) -> int:
    keys = read_keys(path)
    now = datetime.now(UTC)
    if as_json:
        for key in keys:
            print_json(_shown(key, now))
        return 0
    print(f"{'ID':<12}  {'NAME':<20} {'ACCESS':<6} {'LABEL':<20} {'EXPIRES':<20} QUOTA")
    for key in keys:
        shown = _shown(key, now)
        bounds = shown["quota"] | ({} if key.max_network is None else {"network": key.max_network.value})
        quota = " ".join(f"{name}={value}" for name, value in bounds.items())
        expires = "expired" if shown["expired"] else shown["expires_at"] or "never"
        print(f"{key.id}  {key.name:<20} {shown['access']:<6} {shown['label'] or '-':<20} {expires:<20} {quota or '-'}")
    return 0


def _shown(key: ApiKey, now: datetime) -> dict[str, Any]:  # JSON values
    return {
        "id": key.id,
        "name": key.name,
        "access": key.access.name.lower(),
        "label": None if key.label is None else ascii(f"{key.label.name}={key.label.value}")[1:-1],
        "quota": {name: value for name, value in attrs.asdict(key.quota).items() if value is not None},
        "max_network": None if key.max_network is None else key.max_network.value,
        "created_at": _moment(key.created_at),
        "expires_at": _moment(key.expires_at),
        "expired": key.is_over(now),
    }


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _revoke(path: Path, wanted: str, *, as_json: bool) -> int:
    with locked_for_change(path):
        keys = read_keys(path)
        kept = [key for key in keys if wanted not in (key.id, key.name)]
        gone = [key for key in keys if wanted in (key.id, key.name)]
        if not gone:
            raise Stop(f"there is no key {wanted!r}")
        write_keys(path, kept)
    for key in gone:
        if as_json:
            print_json({"id": key.id, "name": key.name, "ok": True})
        else:
            print(f"key {key.id} ({key.name}) is revoked")
    return 0
