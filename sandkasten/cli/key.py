"""The API key on disk: made once, readable for the daemon's user and root alone, told to nobody."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import attrs

from sandkasten.cli.common import Stop
from sandkasten.config import Config
from sandkasten.host import data_dir

_BYTES = 32


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


def make_data_dir(path: Path) -> None:
    """Make the data directory, closed to everybody else, also if it was open before."""
    try:
        data_dir.make_data_dir(path)
    except OSError as error:
        raise Stop(f"can't use {path} as data directory: {error.strerror}") from None


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, encoding="ascii", errors="replace") as file:
        if os.fstat(fd).st_mode & 0o077:
            raise Stop(f"{path} may be read by others; chmod 600 it, or delete it to get a new key")
        return file.read().strip()


def _with(config: Config, key: str) -> Config:
    try:
        return attrs.evolve(config, api_key=key, db_path=config.db_path)
    except ValueError as error:
        raise Stop(f"{config.api_key_path}: {error}") from None
