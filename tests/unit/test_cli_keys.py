"""`sandkasten key`: what it makes, shows and refuses, without a daemon."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sandkasten.admission.keys import read_keys
from sandkasten.cli.main import main
from sandkasten.model.keys import Access, Label, Quota, is_token_of
from tests.waiting import patience


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own configuration is seen."""
    for name in [name for name in os.environ if name.startswith("SANDKASTEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir(mode=0o700)


def key(*arguments: str) -> int:
    return main(["key", *arguments, "--data-dir", "data"])


def test_a_key_is_shown_once_and_kept_as_a_digest(capsys: pytest.CaptureFixture[str]) -> None:
    """stdout has the token and nothing else, for scripts; no file has it."""
    options = ["--read-only", "--label", "team=a", "--expires", "30d", "--max-sessions", "2", "--max-cpu", "1.5"]
    assert key("create", "--name", "ci", *options) == 0
    token = capsys.readouterr().out.strip()
    (made,) = read_keys(Path("data/keys.json"))
    assert is_token_of(made, token.encode())
    assert (made.name, made.access, made.label) == ("ci", Access.READ, Label("team", "a"))
    assert made.quota == Quota(sessions=2, cpu=1.5)
    assert made.expires_at is not None
    assert made.created_at is not None
    assert (made.expires_at - made.created_at).days == 30
    assert token not in Path("data/keys.json").read_text()


def test_a_key_can_write_unless_it_was_said_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    """An administrator's must be asked for."""
    for arguments in (["--name", "a"], ["--name", "b", "--admin"]):
        key("create", *arguments)
    assert [each.access for each in read_keys(Path("data/keys.json"))] == [Access.WRITE, Access.ADMIN]


def test_the_list_shows_keys_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """As a table and as JSON."""
    key("create", "--name", "ci", "--label", "team=\x1b[2J", "--max-execs", "4")
    secret = capsys.readouterr().out.strip().split("_", 2)[2]
    key("list")
    table = capsys.readouterr().out
    key("list", "--json")
    listed = capsys.readouterr().out
    (shown,) = map(json.loads, listed.splitlines())
    assert (shown["name"], shown["access"], shown["quota"]) == ("ci", "write", {"execs": 4})
    assert re.search(rf"^{shown['id']}  ci +write +team=\\x1b\[2J +never +execs=4$", table, re.MULTILINE)
    assert "\x1b" not in table + listed
    assert secret not in table + listed
    assert "digest" not in listed


def test_json_has_the_token_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a new key all that the list shows, and its token; of a revoked one its id."""
    key("create", "--name", "a", "--json")
    made = json.loads(capsys.readouterr().out)
    (kept,) = read_keys(Path("data/keys.json"))
    assert is_token_of(kept, made.pop("token").encode())
    key("list", "--json")
    assert json.loads(capsys.readouterr().out) == made
    key("revoke", "a", "--json")
    assert json.loads(capsys.readouterr().out) == {"id": kept.id, "name": "a", "ok": True}


def test_a_key_is_revoked_by_name_or_id(capsys: pytest.CaptureFixture[str]) -> None:
    """The others stay."""
    for name in ("a", "b", "c"):
        key("create", "--name", name)
    keys = read_keys(Path("data/keys.json"))
    assert key("revoke", "a") == key("revoke", keys[1].id) == 0
    assert [each.name for each in read_keys(Path("data/keys.json"))] == ["c"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "--name", "taken"], "there is a key 'taken'"),
        (["create", "--name", ""], "--name"),
        (["create", "--name", "0123456789ab"], "--name"),
        (["create", "--name", "x", "--label", "novalue"], "--label"),
        (["create", "--name", "x", "--expires", "1y"], "--expires"),
        (["create", "--name", "x", "--expires", "999999w"], "--expires"),
        (["create", "--name", "x", "--max-sessions", "-1"], "sessions"),
        (["create", "--name", "x", "--admin", "--label", "a=b"], "administrator"),
        (["revoke", "nobody"], "there is no key 'nobody'"),
    ],
)
def test_what_can_not_be_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Nothing changes."""
    key("create", "--name", "taken")
    capsys.readouterr()
    assert key(*arguments) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert [each.name for each in read_keys(Path("data/keys.json"))] == ["taken"]


def test_a_damaged_file_is_told_and_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """No command makes a new one over it."""
    path = Path("data/keys.json")
    path.write_text("{")
    for arguments in (["create", "--name", "x"], ["list"], ["revoke", "x"]):
        assert key(*arguments) == 1
        assert "damaged" in capsys.readouterr().err
    assert path.read_text() == "{"


@pytest.mark.slow
def test_commands_at_the_same_time_lose_no_key() -> None:
    """Each reads what the one before it wrote."""
    script = Path(sys.executable).with_name("sandkasten")
    names = [f"n{number}" for number in range(4)]
    running = [
        subprocess.Popen(
            [str(script), "key", "create", "--name", name, "--data-dir", "data"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for name in names
    ]
    tokens = [each.communicate(timeout=patience(30))[0].strip() for each in running]
    keys = {each.name: each for each in read_keys(Path("data/keys.json"))}
    assert all(is_token_of(keys[name], token) for name, token in zip(names, tokens, strict=True))
