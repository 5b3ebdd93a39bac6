"""As whom the daemon runs: what the setting may say, and which ids are refused."""

from __future__ import annotations

import pwd

import pytest

from nsinit.wire.launching import Grant, parse_grant
from nsinit.wire.validate import InvalidName
from sandkasten.config import Config, ConfigError
from sandkasten.host.account import FALLBACK_ID, NAME, ROOT, Account, find_account
from tests.allowance import ALLOWANCE


def test_root_is_said_by_name() -> None:
    """Staying root is a decision of the operator, so it has a word."""
    assert find_account("root") == ROOT
    assert "stays root" in " ".join(Config(user="root").notices())
    assert not any("root" in notice for notice in Config().notices())


def test_without_an_account_a_fixed_id_is_taken() -> None:
    """With one, that."""
    try:
        entry = pwd.getpwnam(NAME)
    except KeyError:
        assert find_account("auto") == Account(FALLBACK_ID, FALLBACK_ID, str(FALLBACK_ID))
    else:
        assert find_account("auto") == Account(entry.pw_uid, entry.pw_gid, NAME)


@pytest.mark.parametrize(
    "user", ["0", "65534", "524288", "600000", "1879048191", "4294967295", "1", "nobody", "no-such"]
)
def test_ids_of_others_are_refused(user: str) -> None:
    """Root by number, nobody, containers and sessions, an account of the system, none at all."""
    with pytest.raises(ConfigError):
        find_account(user)


@pytest.mark.parametrize("user", ["", "Root", "a b", "-1", "1.5", "../x", "x" * 40])
def test_what_is_no_name_is_refused(user: str) -> None:
    """By the configuration, before anything is looked up."""
    with pytest.raises(ValueError, match="user"):
        Config(user=user)


def test_a_grant_holds_the_daemon_to_what_root_said() -> None:
    """Another data directory or cgroup than the granted one is refused; the argument survives the way."""
    grant = Grant("/var/lib/sandkasten", 990, ALLOWANCE, (4, 5))
    assert parse_grant([grant.encode()]) == grant
    grant.check("/var/lib/sandkasten", "auto")
    for data_dir, parent in (("/etc", "auto"), ("/var/lib/sandkasten/x", "auto"), ("/var/lib/sandkasten", "other")):
        with pytest.raises(InvalidName):
            grant.check(data_dir, parent)


@pytest.mark.parametrize(
    "argument", ['{"data_dir": "/x/..", "gid": 1, "beside": []}', '{"data_dir": "/x", "gid": 0, "beside": []}']
)
def test_a_grant_that_makes_no_sense_is_refused(argument: str) -> None:
    """Then nsinit does not start."""
    with pytest.raises(ValueError):
        parse_grant([argument])


def test_no_grant_means_a_daemon_that_is_root() -> None:
    """As in a program that embeds it."""
    assert parse_grant([]) is None
