"""The installation on this machine: which configuration file counts, and how a client reaches its daemon.

The daemon writes where it listens into its data directory (`listening.json`), since a port of 0, `--listen` or the
environment may say otherwise than the file. So the rule by which `serve` finds its configuration is also that by which
`sandkasten ps` finds the daemon. Needs the standard library, and PyYAML for a file of more than plain lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENV_FILE = "SANDKASTEN_CONFIG"
SEARCH_PATH = (
    Path("sandkasten.yaml"),
    Path(".sandkasten/sandkasten.yaml"),
    Path("/etc/sandkasten/sandkasten.yaml"),
)
"""`make run` writes the second, in the directory of the checkout."""
DEFAULT_DATA_DIR = Path("/var/lib/sandkasten")
API_KEY_NAME = "api-key"
LISTENING_NAME = "listening.json"
_MOST_BYTES = 64 * 1024
_PLAIN = re.compile(r"(?:#[\t -~]*|([a-z_]+): +([\w./+-]+(?::[\w./+-]+)*))? *", re.ASCII)
"""A line of a configuration that means the same without YAML."""


class ConfigError(Exception):
    """The configuration can't be used; the message has one line per problem."""


def find_file(explicit: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the configuration file to use: the named one, the environment's, or the first of the search path.

    Raises:
        ConfigError: a file that was not named is another user's, or its directory can't be entered. So nobody chooses
            root's configuration by a file in the directory that root happens to be in.
    """
    if explicit is not None:
        return explicit
    if environ.get(ENV_FILE):
        return Path(environ[ENV_FILE])
    caller = environ.get("SUDO_UID", "")
    trusted = {0, os.geteuid(), int(caller) if caller.isdecimal() else 0}
    for path in SEARCH_PATH:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigError(f"can't read {path}: {error.strerror}; run this with sudo, or name a --config") from None
        if not stat.S_ISREG(status.st_mode):
            continue
        if status.st_uid not in trusted:
            raise ConfigError(f"{path} belongs to user {status.st_uid}; if it is to count, name it with --config")
        return path
    return None


def refuse_writable(path: Path, fd: int) -> None:
    """Refuse an open configuration file that others may write. Raises `ConfigError`."""
    mode = os.fstat(fd).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and stat.S_ISREG(mode):
        raise ConfigError(f"other users may write {path}: run `chmod go-w {shlex.quote(str(path))}`")


# Where the daemon listens


@dataclass(frozen=True)
class Local:
    """The daemon of this machine as a client needs it. `api_key` None: the daemon's is not to be found in a file."""

    url: str
    api_key: str | None
    data_dir: Path


def tell_listening(data_dir: Path, addresses: Sequence[str]) -> None:
    """Write where the daemon that holds `data_dir` listens: URLs, or `unix:` and a path. Raises `OSError`."""
    path = data_dir / LISTENING_NAME
    new = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump({"addresses": list(addresses)}, file)
    new.rename(path)


def forget_listening(data_dir: Path) -> None:
    """Remove what `tell_listening` wrote, if it is there. Raises `OSError`."""
    (data_dir / LISTENING_NAME).unlink(missing_ok=True)


def find_local(config: Path | None, data_dir: Path | None, environ: Mapping[str, str]) -> Local:
    """Return the daemon of this machine's installation, whose configuration `find_file` finds.

    Raises:
        ConfigError: there is no installation, it can't be read by this user, or no daemon of it has told where it
            listens.
    """
    path = find_file(config, environ)
    settings = {} if path is None else _settings(path)
    given = data_dir or environ.get("SANDKASTEN_DATA_DIR") or settings.get("data_dir") or DEFAULT_DATA_DIR
    directory = Path(str(given)).absolute()
    whose = f"configuration {path or 'without a file'}, data directory {directory}"
    try:
        told = json.loads(_read(directory / LISTENING_NAME))
        url = str(told["addresses"][0]).replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
    except FileNotFoundError:
        raise ConfigError(
            f'no server runs here ({whose}): start one with "sandkasten serve", or name another with '
            '"sandkasten context add"'
        ) from None
    except OSError as error:
        raise ConfigError(f"can't read {directory}: {error.strerror}; run this with sudo") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{directory / LISTENING_NAME} is damaged; start the server anew") from None
    key = environ.get("SANDKASTEN_API_KEY") or settings.get("api_key") or _key(directory / API_KEY_NAME)
    return Local(url, None if key is None else str(key), directory)


def _key(path: Path) -> str | None:
    try:
        return _read(path).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; run this with sudo") from None


def _read(path: Path) -> str:
    # A link, or a FIFO that would be waited for, is nothing that the daemon made (open(2)).
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        return file.read(_MOST_BYTES).decode("utf-8", "replace")


def plain_settings(text: str) -> Mapping[str, str] | None:
    """Return a configuration of comments and `name: word` alone, as YAML reads it; None for any other text. The import
    of PyYAML takes 30 ms and more, a fifth of a client verb, and a client's machine may lack it."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        if (match := _PLAIN.fullmatch(line)) is None:
            return None
        if match[1]:
            found[match[1]] = match[2]
    is_text = "api_key" not in found and found.get("data_dir", "/").startswith("/")  # no number, no word for yes or no
    return found if is_text else None


def _settings(path: Path) -> Mapping[str, Any]:
    """Return the top level of a configuration file, unchecked: the daemon checks its own."""
    try:
        with path.open("rb") as file:
            refuse_writable(path, file.fileno())
            content = file.read()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    if (settings := plain_settings(content.decode("latin-1"))) is not None:
        return settings
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"reading {path} needs PyYAML: install sandkasten-runtime[server], or name the server in SANDKASTEN_URL"
        ) from None
    try:
        tree = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    return tree if isinstance(tree, dict) else {}
