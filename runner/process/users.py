"""Accounts that runs may have: names of the image's account files, or numbers. Parsing is pure; only `look_up` reads.

The files are not trusted, for the image's author wrote them. They are read as the session's user, up to a bound, and a
line that makes no sense is no line. Whatever they say, no run has PID 1's uid or group, and none has root's unless the
sandbox was built for it.

Sources: passwd(5), group(5), credentials(7).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator

from runner.loop.context import Context, Refused
from runner.loop.identity import ROOT_ID, UserAccount
from runner.loop.kernel import AT_FDCWD, RESOLVE_NO_MAGICLINKS

MAX_ID = 65534
"""Largest uid and gid of a run. The next one is PID 1's, and the user namespace has no others."""

MAX_FILE_BYTES = 1024 * 1024
MAX_GROUPS = 64

_DIGITS = re.compile(r"[0-9]{1,10}")
_NUMBER = re.compile(rb"[0-9]{1,10}")
_PASSWD_FIELDS = 7
_GROUP_FIELDS = 4


def look_up(context: Context, user: str) -> UserAccount:
    """Return the account that `user` means in this image.

    Raises:
        Refused: NO_SUCH_USER, nobody may run as that.
    """
    account = resolve(user, _read(context, b"/etc/passwd"), _read(context, b"/etc/group"))
    if account is None:
        raise Refused("NO_SUCH_USER", f"no user a program may run as: {user[:64]!r}")
    if account.uid == ROOT_ID and not context.config.root_inside:
        raise Refused("NO_SUCH_USER", f"this session was built without root: {user[:64]!r}")
    return account


def resolve(user: str, passwd: bytes, group: bytes) -> UserAccount | None:
    """Return the account of `USER[:GROUP]`, each a name or a number, None if there is none or no run may have it.
    Root's is returned.

    Numbers need no account; then the group has the same number, the home is `/` (root's `/root`) and the name is the
    number (root's `root`).
    """
    name, colon, group_name = user.partition(":")
    if _DIGITS.fullmatch(name) is None:
        account = _find(passwd, lambda each: each.name == name)
    else:
        uid = int(name)
        account = _find(passwd, lambda each: each.uid == uid) or _unlisted(uid)
    if account is None:
        return None
    gid = _gid_of(group_name, group) if colon else account.gid
    is_root = account.uid == ROOT_ID
    if gid is None or not account.uid <= MAX_ID or not _is_group(gid, is_root=is_root):
        return None
    groups = [each for each in _groups_of(account.name, group, is_root=is_root) if each != gid]
    return UserAccount(account.uid, gid, tuple(groups[:MAX_GROUPS]), account.name, account.home)


def _gid_of(name: str, group: bytes) -> int | None:
    """Return the id of a group by its name or number."""
    if _DIGITS.fullmatch(name):
        return int(name)
    for fields in _lines(group, _GROUP_FIELDS):
        if fields[0] and os.fsdecode(fields[0]) == name and _NUMBER.fullmatch(fields[2]):
            return int(fields[2])
    return None


def names_of(content: bytes, *, is_group: bool = False) -> dict[int, str]:
    """Return the names in an account file by their ids; the first of an id."""
    names: dict[int, str] = {}
    for fields in _lines(content, _GROUP_FIELDS if is_group else _PASSWD_FIELDS):
        if fields[0] and _NUMBER.fullmatch(fields[2]):
            names.setdefault(int(fields[2]), os.fsdecode(fields[0]))
    return names


def _unlisted(uid: int) -> UserAccount:
    return UserAccount(uid, uid, (), "root", "/root") if uid == ROOT_ID else UserAccount(uid, uid, (), str(uid), "/")


def _is_group(gid: int, *, is_root: bool) -> bool:
    """Return whether a run may be in a group: none in PID 1's, and only root in root's."""
    return 0 < gid <= MAX_ID or (gid == ROOT_ID and is_root)


def _find(passwd: bytes, is_wanted: Callable[[UserAccount], bool]) -> UserAccount | None:
    """Return the first account in the file for which `is_wanted`, None if there is none."""
    for fields in _lines(passwd, _PASSWD_FIELDS):
        if fields[0] and _NUMBER.fullmatch(fields[2]) and _NUMBER.fullmatch(fields[3]):
            home = os.fsdecode(fields[5]) if fields[5].startswith(b"/") else "/"
            account = UserAccount(int(fields[2]), int(fields[3]), (), os.fsdecode(fields[0]), home)
            if is_wanted(account):
                return account
    return None


def _groups_of(name: str, group: bytes, *, is_root: bool) -> Iterator[int]:
    """Yield the ids of the groups that list a user as a member and that a run may be in."""
    for fields in _lines(group, _GROUP_FIELDS):
        if os.fsencode(name) in fields[3].split(b",") and _NUMBER.fullmatch(fields[2]):
            gid = int(fields[2])
            if _is_group(gid, is_root=is_root):
                yield gid


def _lines(content: bytes, count: int) -> Iterator[list[bytes]]:
    for line in content[:MAX_FILE_BYTES].split(b"\n"):
        fields = line.split(b":")
        if len(fields) == count and b"\0" not in line:
            yield fields


def _read(context: Context, path: bytes) -> bytes:
    """Return the beginning of a regular file as the session's user sees it, nothing if there is none."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        with context.as_user:
            fd = context.kernel.openat2(AT_FDCWD, path, flags, 0, RESOLVE_NO_MAGICLINKS)
    except OSError:
        return b""
    try:
        return os.read(fd, MAX_FILE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(fd)
