"""The daemon's user once no step needs root any more: `user:` of the configuration, looked up.

Reads the system's accounts and changes nothing. An id of another account, or in the ranges of sessions and other
containers, is refused: a process with the daemon's id can do to the daemon what it likes.

Sources: passwd(5); subuid(5); systemd's "Users, Groups, UIDs and GIDs" for the owners of ranges.
"""

from __future__ import annotations

import grp
import pwd

import attrs

from sandkasten.config import ConfigError

NAME = "sandkasten"
FALLBACK_ID = 61_100
"""User and group without an account `sandkasten`: in a range that neither distributions nor systemd hand out."""

_OVERFLOW_ID = 65_534
_CONTAINER_IDS = range(524_288, 1_879_048_192)


@attrs.frozen
class Account:
    """A numeric user and group. 0: the daemon stays root."""

    uid: int
    gid: int
    name: str

    @property
    def is_root(self) -> bool:
        return self.uid == 0


ROOT = Account(0, 0, "root")


def find_account(user: str) -> Account:
    """Return the account for `auto`, `root`, an account's name or a number.

    Raises:
        ConfigError: there is no such account, or its id is unfit for a daemon.
    """
    if user == "root":
        return ROOT
    if user == "auto":
        return _named(NAME) or _numbered(FALLBACK_ID)
    if user.isdigit():
        return _numbered(int(user))
    account = _named(user)
    if account is None:
        raise ConfigError(f"user: there is no account {user!r}")
    return account


def _named(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return _checked(Account(entry.pw_uid, entry.pw_gid, name))


def _numbered(uid: int) -> Account:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        pass
    else:
        raise ConfigError(f"user: {uid} is the id of account {entry.pw_name!r}; name an account made for the daemon")
    try:
        group = grp.getgrgid(uid)
    except KeyError:
        return _checked(Account(uid, uid, str(uid)))
    raise ConfigError(f"user: {uid} is the id of group {group.gr_name!r}; name an account made for the daemon")


def _checked(account: Account) -> Account:
    for number in (account.uid, account.gid):
        if number == 0 or number >= 2**32 - 1:
            raise ConfigError(f"user: {account.name} has id {number}; write `root` to keep all privileges")
        if number == _OVERFLOW_ID or number in _CONTAINER_IDS:
            raise ConfigError(f"user: id {number} belongs to `nobody` or to containers; choose another")
    return account
