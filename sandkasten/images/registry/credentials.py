"""Names and passwords by registry: a file in the form of Docker's `config.json`, of which `auths` is read.

Helpers that the form may name are programs; none is run. The file is closed to other users, and no error or log has a
password. Sources: docker-login(1); distribution-spec, "Authentication".
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

import attrs

from sandkasten.config import ConfigError
from sandkasten.images.registry.reference import HUB

_HUB_KEY: Final = "https://index.docker.io/v1/"
_MAX_BYTES = 1 << 20
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@attrs.frozen
class Credentials:
    """A user's name and password, or a token in the place of one."""

    username: str
    password: str = attrs.field(repr=False)

    @property
    def basic(self) -> str:
        """The value of a header `Authorization` (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode("ascii")


def read_credentials(path: Path, registry: str) -> Credentials | None:
    """Return the credentials for a registry; None without any.

    Raises:
        ConfigError: the file can't be used; the message says why, without its content.
    """
    entry = _auths(_read(path)).get(_key(registry))
    if not isinstance(entry, dict) or not entry.get("auth"):
        return None
    try:
        username, colon, password = base64.b64decode(entry["auth"], validate=True).decode("utf-8").partition(":")
    except (binascii.Error, UnicodeDecodeError, TypeError):
        raise ConfigError(f"{path}: the entry of {registry} can't be read; log in again") from None
    return Credentials(username, password) if colon else None


def write_credentials(path: Path, registry: str, credentials: Credentials, *, owner: tuple[int, int]) -> None:
    """Put the credentials of a registry into the file, in place of earlier ones; `owner`: user and group ids of it.

    Raises:
        ConfigError: what is there is no such file.
        OSError: the file can't be written.
    """
    content = _read(path)
    entry = {"auth": base64.b64encode(f"{credentials.username}:{credentials.password}".encode()).decode("ascii")}
    content["auths"] = {**_auths(content), _key(registry): entry}
    draft = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()  # of a writer that was killed
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchown(fd, *owner)
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(fd)
    draft.rename(path)


def _key(registry: str) -> str:
    return _HUB_KEY if registry == HUB else registry


def _auths(content: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    auths = content.get("auths") or {}
    return auths if isinstance(auths, dict) else {}


def _read(path: Path) -> dict[str, Any]:  # Any: JSON
    try:
        fd = os.open(path, _FILE)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{path} must be a file that no other user can read: chmod 600")
        try:
            content = json.loads(file.read(_MAX_BYTES))
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} is no JSON") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object")
    return content
