"""Files of the broker, in a directory of its user's: the secrets, and the key of the authority.

Everything is reached by the descriptor of that directory, which is opened while the process is still root. A file is
replaced whole: written beside, synced, renamed, and the directory synced. A file that can't be read is an error and
never replaced. Sources: open(2), rename(2), fsync(2); inode(7) (the sticky bit of the data directory).
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from egress.brokering import SecretFacts, secret_problem
from egress.policy import EgressRule, parse_rule
from egress.protocol import SecretUse

DIRECTORY = "broker"
SECRETS, AUTHORITY = "secrets.json", "authority.pem"
_MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_MODE = 0o700
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@attrs.frozen
class KeptSecret:
    """A secret. Its text has no value in it."""

    name: str
    value: str = attrs.field(repr=False)
    hosts: tuple[str, ...]
    placeholder: str | None = None
    rules: tuple[EgressRule, ...] = attrs.field(
        init=False, default=attrs.Factory(lambda self: tuple(map(parse_rule, self.hosts)), takes_self=True)
    )

    @property
    def facts(self) -> SecretFacts:
        return SecretFacts(self.name, self.hosts, self.placeholder)

    def is_for(self, host: str, port: int) -> bool:
        """Tell whether a canonical name and a port are of the secret's hosts."""
        return any(rule.is_for_name(host) and port in rule.ports for rule in self.rules)


def open_directory(data_dir: str, owner: int) -> int:
    """Return a descriptor of the broker's directory in the data directory, made if there is none. Runs as root.

    Others may make entries there, and can't rename or remove those of another user. Raises `OSError`: the directory is
    somebody else's.
    """
    parent = os.open(data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            os.mkdir(DIRECTORY, _MODE, dir_fd=parent)
        except FileExistsError:
            pass
        fd = os.open(DIRECTORY, _READ | os.O_DIRECTORY, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        status = os.fstat(fd)
        if status.st_uid == 0 and owner != 0 and not os.listdir(fd):  # made just now
            os.fchmod(fd, _MODE)
            os.fchown(fd, owner, owner)
        elif status.st_uid != owner or stat.S_IMODE(status.st_mode) != _MODE:
            raise OSError(errno.EPERM, f"{DIRECTORY} in the data directory is not the broker's")
    except BaseException:
        os.close(fd)
        raise
    return fd


class Safe:
    """The files of a directory. Constructed by the directory's owner; raises `OSError`, `ValueError`: a file is
    damaged."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._secrets: dict[str, KeptSecret] = {}
        for said in json.loads(self.read(SECRETS) or b"[]"):
            secret = KeptSecret(said["name"], said["value"], tuple(said["hosts"]), said["placeholder"])
            if problem := secret_problem(secret.name, secret.value, secret.hosts, secret.placeholder):
                raise ValueError(f"a secret that is none: its {problem[0]}")
            self._secrets[secret.name] = secret

    def __len__(self) -> int:
        return len(self._secrets)

    def __contains__(self, name: str) -> bool:
        return name in self._secrets

    @property
    def facts(self) -> Iterable[SecretFacts]:
        """The secrets without their values, in the order of names."""
        return (self._secrets[name].facts for name in sorted(self._secrets))

    def values_for(self, uses: Iterable[SecretUse], host: str, port: int) -> Mapping[bytes, bytes]:
        """Return the values that a session may use at a host, each by its placeholder."""
        found = ((use, self._secrets.get(use.name)) for use in uses)
        return {
            use.placeholder.encode("ascii"): secret.value.encode("ascii")
            for use, secret in found
            if secret is not None and secret.is_for(host, port)
        }

    def put(self, secret: KeptSecret) -> None:
        """Keep a secret, in place of one of its name. Raises `OSError`, and nothing has changed."""
        self._replace({**self._secrets, secret.name: secret})

    def drop(self, name: str) -> None:
        """Forget a secret that is there. Raises as `put`."""
        self._replace({each: secret for each, secret in self._secrets.items() if each != name})

    def _replace(self, secrets: dict[str, KeptSecret]) -> None:
        said = [attrs.asdict(secret, filter=attrs.filters.exclude("rules")) for secret in secrets.values()]
        self.write(SECRETS, json.dumps(said).encode("ascii"))
        self._secrets = secrets

    def read(self, name: str) -> bytes | None:
        """Return a file's content, None if there is none. Raises `OSError`."""
        try:
            fd = os.open(name, _READ, dir_fd=self._directory_fd)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(_MAX_FILE_BYTES)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file. Raises `OSError`, and the file is what it was."""
        fresh = f"{name}.new"
        try:
            os.unlink(fresh, dir_fd=self._directory_fd)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=self._directory_fd), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(fresh, name, src_dir_fd=self._directory_fd, dst_dir_fd=self._directory_fd)
        os.fsync(self._directory_fd)
