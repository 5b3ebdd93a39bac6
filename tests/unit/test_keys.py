"""API keys: tokens, the file they are kept in, and the ring that finds them."""

from __future__ import annotations

import base64
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkasten.admission.keys import KeyFileError, KeyRing, read_keys, write_keys
from sandkasten.errors import Unauthorized
from sandkasten.model.keys import Access, ApiKey, Label, Quota, digest_of, id_of, is_token_of, make_token
from sandkasten.model.network import NetworkMode
from tests.api.keys import READ, WRITE, issue

FULL = ApiKey(
    "0123456789ab",
    "ci",
    Access.READ,
    label=Label("team", "a=b\n\u2028"),
    quota=Quota(sessions=3, cpu=1.5, execs=0),
    max_network=NetworkMode.ALLOW,
    created_at=datetime(2030, 1, 1, tzinfo=UTC),
    expires_at=datetime(2030, 1, 2, tzinfo=UTC),
    digest=digest_of(b"token"),
)


def test_a_token_names_its_id_and_has_256_random_bits() -> None:
    """No two are alike, and what is kept is not in them."""
    made = [make_token() for _ in range(50)]
    assert len({token for _, token in made}) == len({key_id for key_id, _ in made}) == 50
    for key_id, token in made:
        assert id_of(token.encode()) == key_id
        secret = token.removeprefix(f"sk_{key_id}_")
        assert len(base64.urlsafe_b64decode(secret + "=")) == 32


@pytest.mark.parametrize("token", ["", "sk_", "sk_0123456789ab", "sk-0123456789ab_x", "sk_0123456789AB_x", "x" * 300])
def test_other_texts_name_no_id(token: str) -> None:
    """Not even one that begins like a token, unless its id is one."""
    assert id_of(token.encode()) == ("0123456789ab" if token == "sk_0123456789ab" else None)


def test_only_the_whole_token_is_right() -> None:
    """Neither a part, nor another key's, nor any for a key that is not there or keeps no digest."""
    token = READ.token.encode()
    assert is_token_of(READ.key, token)
    wrong = (token[:-1], token + b"x", WRITE.token.encode(), READ.key.id.encode(), b"")
    assert not any(is_token_of(READ.key, each) for each in wrong)
    assert not is_token_of(None, token)
    assert not is_token_of(attrs.evolve(READ.key, digest=b""), b"")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Every field of every key; and the file is no other user's to read or write."""
    path = tmp_path / "keys.json"
    keys = [FULL, READ.key]
    write_keys(path, keys)
    assert read_keys(path) == keys
    assert path.stat().st_mode & 0o777 == 0o640
    assert READ.token.encode() not in path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_and_an_empty_one_have_no_keys(tmp_path: Path) -> None:
    """Both are a beginning."""
    path = tmp_path / "keys.json"
    assert read_keys(path) == []
    path.touch()
    assert read_keys(path) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"version": 1', '"version": 2'),
        ('"read"', '"ADMIN"'),
        ('"read"', '"none"'),
        ('"id": "0123456789ab"', '"id": "../../etc/x"'),
        ('"sessions": 3', '"sessions": "3"'),
        ('"sessions": 3', '"sessions": -1'),
        ('"sessions": 3', '"sessions": true'),
        ('"sessions": 3', '"session": 3'),
        ("+00:00", ""),
        ('"name": "team"', '"name": 5'),
        ('"digest": "', '"digest": "0'),
        ('"access": "read"', '"access": "admin"'),
        ('"max_network": "allow"', '"max_network": "host"'),
        ('"max_network": "allow"', '"max_networks": "allow"'),
        ("]", ""),
    ],
)
def test_a_damaged_file_gives_no_key(tmp_path: Path, before: str, after: str) -> None:
    """One wrong field and the whole is refused: it must not give more, or limit less, than was written."""
    path = tmp_path / "keys.json"
    write_keys(path, [FULL, READ.key])
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(KeyFileError):
        read_keys(path)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bytes_that_changed_are_refused_or_give_keys_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Reading a damaged file ends in keys or in `KeyFileError`."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(path, [FULL])
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        assert all(isinstance(each, ApiKey) for each in read_keys(path))
    except KeyFileError:
        pass


def test_a_file_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    """Neither is a link, nor a file with a second name."""
    path = tmp_path / "keys.json"
    write_keys(path, [FULL])
    path.chmod(0o660)
    with pytest.raises(KeyFileError, match="other users may write"):
        read_keys(path)
    path.chmod(0o640)
    os.link(path, tmp_path / "second")
    with pytest.raises(KeyFileError, match="not a plain file"):
        read_keys(path)
    path.unlink()
    path.symlink_to(tmp_path / "second")
    with pytest.raises(OSError, match="symbolic links"):
        read_keys(path)


# The ring -----------------------------------------------------------------------------------------------------------


def test_the_ring_finds_a_key_by_its_token_alone() -> None:
    """The holder of an expired key is told so."""
    old = issue(Access.WRITE, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    ring = KeyRing()
    ring.replace([READ.key, old.key])
    assert ring.find(READ.token.encode()) == READ.key
    assert ring.find(WRITE.token.encode()) is None
    with pytest.raises(Unauthorized, match="expired"):
        ring.find(old.token.encode())
    assert ring.find(old.token[:-1].encode()) is None
    assert list(ring.last_used) == [READ.key.id]


@pytest.mark.parametrize(
    ("after", "goes_on"),
    [
        ([], False),
        ([attrs.evolve(WRITE.key, access=Access.READ)], False),
        ([attrs.evolve(WRITE.key, label=Label("team", "a"))], False),
        ([attrs.evolve(WRITE.key, max_network=NetworkMode.NONE)], False),
        ([attrs.evolve(WRITE.key, expires_at=datetime(2020, 1, 1, tzinfo=UTC))], False),
        ([attrs.evolve(WRITE.key, name="other", quota=Quota(sessions=1))], True),
        ([WRITE.key, READ.key], True),
    ],
)
async def test_what_goes_on_with_a_key_ends_when_that_gives_less(after: list[ApiKey], goes_on: bool) -> None:
    """Revoked, confined, expired: the use is over; renamed or with another quota it is not."""
    ring = KeyRing()
    ring.replace([WRITE.key])
    use = ring.use()
    ended = False
    try:
        with trio.move_on_after(60) as patience, use.running():
            use.bind(WRITE.key)
            ring.replace(after)
            if goes_on:
                patience.cancel()
            await trio.sleep_forever()
    except Unauthorized:
        ended = True
    assert ended is not goes_on


async def test_a_use_that_is_over_leaves_nothing_behind() -> None:
    """A key that is revoked later ends only what still goes on."""
    ring = KeyRing()
    ring.replace([WRITE.key])
    for _ in range(3):
        use = ring.use()
        with use.running():
            use.bind(WRITE.key)
        ring.end_uses()
        assert not use.has_been_ended
    ring.replace([])
    assert not use.has_been_ended
