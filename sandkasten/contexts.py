"""Servers that a client may speak to, with their keys: by name in a file of the user's, or the one of this machine.

The first that is given counts: arguments, the environment (`SANDKASTEN_URL`, `SANDKASTEN_CONTEXT`, or the name of a
local configuration), the context that `sandkasten context use` chose, the installation of this machine
(`installation.py`).
The file is `$XDG_CONFIG_HOME/sandkasten/contexts.json`; a context has its key in it, in another file, or from a command
that prints it. A file with keys that others may read is refused, as is another user's, since it names commands.

Source: XDG Base Directory Specification 0.8.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandkasten.installation import ENV_FILE, ConfigError, find_local

LOCAL = "local"
"""The context that is the installation of this machine; it is in no file."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_COMMAND_S = 120.0
"""Time for a command that prints a key: a password manager may ask for its own."""


@dataclass(frozen=True)
class Server:
    """A server and the key for it; `chosen_by` says where both come from."""

    url: str
    api_key: str | None = field(repr=False)
    chosen_by: str


@dataclass(frozen=True)
class NamedServer:
    """A named server. At most one of the keys is given."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    api_key_command: str | None = None


@dataclass
class Contexts:
    """All named servers, and the name of the chosen one."""

    by_name: dict[str, NamedServer] = field(default_factory=dict)
    current: str | None = None


def choose_server(
    environ: Mapping[str, str], *, context: str | None = None, config: Path | None = None, data_dir: Path | None = None
) -> Server:
    """Return the server that the arguments, the environment, the contexts or this machine say.

    Raises:
        ConfigError: there is none, or its key can't be had; the message is a sentence for people.
    """
    name = chosen_context(environ, context=context, config=config, data_dir=data_dir)
    if not name:
        return Server(environ["SANDKASTEN_URL"], environ.get("SANDKASTEN_API_KEY") or None, "SANDKASTEN_URL")
    if name != LOCAL:
        chosen = read_contexts(environ).by_name.get(name)
        if chosen is None:
            raise ConfigError(f"there is no context {name!r}: `sandkasten context list` shows those there are")
        return Server(chosen.url, _key_of(name, chosen), f"context {name!r}")
    local = find_local(config, data_dir, environ)
    return Server(local.url, local.api_key, f"data directory {local.data_dir}")


def chosen_context(
    environ: Mapping[str, str], *, context: str | None = None, config: Path | None = None, data_dir: Path | None = None
) -> str:
    """Return the name of the context that is meant; empty: the server of `SANDKASTEN_URL`. Raises `ConfigError`."""
    if context is None and config is None and data_dir is None:
        if environ.get("SANDKASTEN_URL"):
            return ""
        context = environ.get("SANDKASTEN_CONTEXT")
        if not context and not (environ.get(ENV_FILE) or environ.get("SANDKASTEN_DATA_DIR")):
            context = read_contexts(environ).current
    return context or LOCAL


def _key_of(name: str, context: NamedServer) -> str | None:
    if context.api_key_file is not None:
        try:
            return Path(context.api_key_file).expanduser().read_text("utf-8", "replace").strip()
        except OSError as error:
            raise ConfigError(f"context {name!r}: can't read {context.api_key_file}: {error.strerror}") from None
    if context.api_key_command is not None:
        import subprocess  # 5 ms, for few

        try:
            done = subprocess.run(
                ["/bin/sh", "-c", context.api_key_command], stdout=subprocess.PIPE, timeout=_COMMAND_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"context {name!r}: the command that prints the key failed: {error}") from None
        key = done.stdout.decode("utf-8", "replace").partition("\n")[0].strip()
        if done.returncode != 0 or not key:
            raise ConfigError(
                f"context {name!r}: the command that prints the key printed none (exit status {done.returncode})"
            )
        return key
    return context.api_key


# The file


def contexts_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the file, which need not exist."""
    return own_directory(environ, "XDG_CONFIG_HOME", ".config") / "contexts.json"


def own_directory(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """Return our directory below one of the user's, which a variable names, or `default` below the home directory."""
    named, home = environ.get(variable, ""), environ.get("HOME") or os.path.expanduser("~")
    # Where the user has no home (a number without an account), nothing of ours is found or kept.
    below = Path(named) if os.path.isabs(named) else Path(home if os.path.isabs(home) else "/nonexistent") / default
    return below / "sandkasten"


def read_contexts(environ: Mapping[str, str]) -> Contexts:
    """Return what the file says; nothing if there is none.

    Raises:
        ConfigError: the file is damaged, another user's, or open to others.
    """
    path = contexts_path(environ)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = json.loads(file.read())
        found = Contexts({str(name): _context(each) for name, each in data["contexts"].items()}, data["current"])
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{path} is damaged: mend it, or remove it") from None
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path} belongs to user {status.st_uid}: set HOME or XDG_CONFIG_HOME to your own")
    if status.st_mode & 0o077:
        raise ConfigError(f"other users may use {path}, which has keys: chmod 600 it")
    return found


def _context(value: Mapping[str, Any]) -> NamedServer:
    return NamedServer(**{str(name): str(text) for name, text in value.items()})


@contextmanager
def changed_contexts(environ: Mapping[str, str]) -> Iterator[Contexts]:
    """Yield what the file says, and write that at the end of the block. One process at a time does so (flock(2)).

    Raises:
        ConfigError: the file can't be read or written.
    """
    directory = contexts_path(environ).parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            contexts = read_contexts(environ)
            yield contexts
            _write_contexts(environ, contexts)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"can't change {contexts_path(environ)}: {error.strerror}") from None


def _write_contexts(environ: Mapping[str, str], contexts: Contexts) -> None:
    """Replace the file in one step, closed to other users. Raises `OSError`."""
    path = contexts_path(environ)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    by_name = {
        name: {field: text for field, text in asdict(context).items() if text is not None}
        for name, context in contexts.by_name.items()
    }
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump({"current": contexts.current, "contexts": by_name}, file, indent=2)
            file.flush()
            os.fsync(fd)
        new.replace(path)
    except BaseException:
        new.unlink()
        raise
