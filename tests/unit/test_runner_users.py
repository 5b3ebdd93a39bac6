"""Accounts of programs, from account files of any quality."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.loop.identity import UserAccount
from runner.process.users import MAX_FILE_BYTES, MAX_GROUPS, MAX_ID, resolve

PASSWD = b"""\
root:x:0:0:root:/root:/bin/bash
alice:x:1001:100:Alice,,,:/home/alice:/bin/sh
bob:x:1002:1002::relative:/bin/sh
toor:x:0:100::/root:/bin/sh
wheel:x:1003:0::/home/wheel:/bin/sh
init:x:65535:65535::/:/bin/sh
high:x:4294967295:100::/:/bin/sh
alice:x:7:7::/second:/bin/sh
caf\xc3\xa9:x:1004:1004::/home/\xff:/bin/sh
short:x:1005:1005
letters:x:10a:10::/:/bin/sh
minus:x:-1:10::/:/bin/sh
:x:1006:1006::/nameless:/bin/sh
nul\0:x:1007:1007::/:/bin/sh
"""

GROUP = b"""\
root:x:0:alice
users:x:100:
docker:x:200:bob,alice
audio:x:201:alicia,alice2
video:x:202:alice
init:x:65535:alice
broken:x:alice
"""


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("alice", UserAccount(1001, 100, (200, 202), "alice", "/home/alice")),
        ("1001", UserAccount(1001, 100, (200, 202), "alice", "/home/alice")),
        ("1001:5", UserAccount(1001, 5, (200, 202), "alice", "/home/alice")),
        ("bob", UserAccount(1002, 1002, (200,), "bob", "/")),
        ("caf\xe9", UserAccount(1004, 1004, (), "caf\xe9", "/home/\udcff")),
        ("4000", UserAccount(4000, 4000, (), "4000", "/")),
        ("4000:4001", UserAccount(4000, 4001, (), "4000", "/")),
        ("1006", UserAccount(1006, 1006, (), "1006", "/")),
        ("alice:audio", UserAccount(1001, 201, (200, 202), "alice", "/home/alice")),
        ("alice:5", UserAccount(1001, 5, (200, 202), "alice", "/home/alice")),
        ("1001:docker", UserAccount(1001, 200, (202,), "alice", "/home/alice")),
        ("root:root", UserAccount(0, 0, (), "root", "/root")),
        ("root", UserAccount(0, 0, (), "root", "/root")),
        ("0:0", UserAccount(0, 0, (), "root", "/root")),
        ("toor", UserAccount(0, 100, (), "toor", "/root")),
        (str(MAX_ID), UserAccount(MAX_ID, MAX_ID, (), str(MAX_ID), "/")),
    ],
)
def test_an_account_is_found(user: str, expected: UserAccount) -> None:
    """By name or number; the first of a name counts, and groups that list it, those of root and PID 1 excepted."""
    assert resolve(user, PASSWD, GROUP) == expected


@pytest.mark.parametrize(
    "user",
    [
        *("wheel", "init", "high", "nobody", "short", "letters", "minus", "nul\0", ""),
        *("65535", "65536", "1001:0", "1001:65535", "1001:", ":100", "1001:x", "-1", "+1", " 1001", "1001 ", "1001\n"),
        *(
            "٣",
            "0x10",
            "99999999999",
            "alice:root",
            "1001:init",
            "alice:broken",
            "alice:",
            "alice:5:5",
            "nobody:docker",
        ),
    ],
)
def test_nobody_else_is(user: str) -> None:
    """PID 1, its group, root's for others, numbers out of range, lines that make no sense, names that aren't there."""
    assert resolve(user, PASSWD, GROUP) is None


def test_files_are_optional() -> None:
    """An image without them has numbers only."""
    assert resolve("1001", b"", b"") == UserAccount(1001, 1001, (), "1001", "/")
    assert resolve("alice", b"", b"") is None
    assert resolve("0", b"", b"") == UserAccount(0, 0, (), "root", "/root")


def test_there_are_bounds() -> None:
    """On what is read of a file and on the number of groups."""
    groups = b"".join(b"g%d:x:%d:alice\n" % (number, number) for number in range(1, 1000))
    account = resolve("alice", PASSWD, groups)
    assert account is not None
    assert len(account.groups) == MAX_GROUPS
    assert resolve("alice", b"#" * MAX_FILE_BYTES + b"\n" + PASSWD, b"") is None


@given(st.text(max_size=20), st.binary(max_size=300), st.binary(max_size=300))
def test_whatever_the_files_say_nobody_is_pid_1(user: str, passwd: bytes, group: bytes) -> None:
    """Hostile content gives an account within bounds, or none."""
    names = [line.split(b":")[0].decode("utf-8", "surrogateescape") for line in passwd.split(b"\n")]
    groups = [line.split(b":")[0].decode("utf-8", "surrogateescape") for line in group.split(b"\n")]
    for each in (*names, user, "1001", *(f"alice:{name}" for name in groups)):
        account = resolve(each, PASSWD + passwd, GROUP + group)
        if account is not None:
            ids = (account.uid, account.gid, *account.groups)
            assert all(0 <= number <= MAX_ID for number in ids)
            assert account.uid == 0 or 0 not in ids
            assert account.home.startswith("/")
