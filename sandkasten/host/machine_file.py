"""What root found on the machine, on disk, for a daemon that is never root: written by `sandkasten nsinit`.

`<data_dir>/machine.json` is root's, and believed only then. Written whole or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
from datetime import datetime
from pathlib import Path

import attrs

from sandkasten.config import ConfigError
from sandkasten.model.node import Check, Machine, Verdict

_MAX_BYTES = 1024 * 1024


def write_machine(path: Path, machine: Machine, *, gid: int) -> None:
    """Replace the file; the group `gid` may read it."""
    checks = [attrs.asdict(check) for check in machine.checks]
    fields = {"examined_at": machine.examined_at.isoformat(), "checks": checks, "facts": dict(machine.facts)}
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(fields, file)
            os.fchown(fd, 0, gid)
            os.fchmod(fd, 0o640)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read_machine(path: Path) -> Machine:
    """Return what was written.

    Raises:
        ConfigError: there is nothing of root's to read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if os.fstat(file.fileno()).st_uid != 0:
                raise ConfigError(f"{path} does not belong to root; remove it and restart `sandkasten nsinit`")
            fields = json.loads(file.read(_MAX_BYTES))
        checks = [Check(**each | {"verdict": Verdict(each["verdict"])}) for each in fields["checks"]]
        return Machine(datetime.fromisoformat(fields["examined_at"]), checks, fields["facts"])
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; is `sandkasten nsinit` running?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is of another version; restart `sandkasten nsinit`") from error
