"""Ids that were used are known for good, over any number of daemons, and damage is told."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from sandkasten.output.used_ids import UsedIds, UsedIdsFile, digest_of

from sandkasten.model.run import is_made, make_exec_id

ENTRY_BYTES = 12


def stored(path: Path, *exec_ids: str) -> UsedIdsFile:
    file = UsedIdsFile(path)
    for exec_id in exec_ids:
        file.append([digest_of(exec_id)])
    return file


def found(path: Path) -> UsedIdsFile:
    file = UsedIdsFile(path)
    file.found()
    return file


@given(st.lists(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=6)))
def test_the_set_holds_what_was_put_in_and_nothing_else(exec_ids: list[str]) -> None:
    """As a set of Python's does."""
    used, oracle = UsedIds(), set[str]()
    for exec_id in exec_ids:
        assert (used.add(exec_id) is None) == (exec_id in oracle)
        oracle.add(exec_id)
        assert len(used) == len(oracle)
    again = UsedIds.of(digest_of(exec_id) for exec_id in 2 * exec_ids)
    assert len(again) == len(oracle)
    assert all(exec_id in used and exec_id in again for exec_id in oracle)
    assert not any(f"{exec_id} " in used for exec_id in oracle)


def test_very_many_take_few_bytes_each() -> None:
    """Two hundred thousand digests take less than 12 bytes each."""
    chance = random.Random(1)
    digests = [chance.getrandbits(64) for _ in range(200_000)]
    tracemalloc.start()
    try:
        used = UsedIds.of(digests)
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(used) == len(set(digests))
    assert size_bytes < 12 * len(used)


def test_the_next_daemon_knows_them(tmp_path: Path) -> None:
    """Also what it adds itself, and an entry that was written twice counts once."""
    path = tmp_path / "x.ids"
    stored(path, "a", "b")
    second = found(path)
    assert len(second.read()) == 2
    second.append([digest_of("b"), digest_of("c")])
    used = found(path).read()
    assert (len(used), used.is_whole) == (3, True)
    assert all(each in used for each in "abc")


def test_an_entry_that_was_not_finished_is_taken_off(tmp_path: Path) -> None:
    """A daemon that was killed while it wrote: what comes after it is read again."""
    path = tmp_path / "x.ids"
    stored(path, "a", "b")
    os.truncate(path, 2 * ENTRY_BYTES - 5)
    second = found(path)
    used = second.read()
    assert ("a" in used, "b" in used, used.is_whole) == (True, False, True)
    second.append([digest_of("c")])
    third = found(path).read()
    assert (len(third), "c" in third, third.is_whole) == (2, True, True)


@settings(max_examples=50, deadline=None)
@given(place=st.integers(0, 3 * ENTRY_BYTES - 1), bit=st.integers(0, 7))
def test_a_changed_bit_is_told(tmp_path_factory: object, place: int, bit: int) -> None:
    """Wherever it is: the other entries are still known, and that not all are is, too."""
    path = Path(tmp_path_factory.mktemp("ids")) / "x.ids"  # type: ignore[attr-defined]
    stored(path, "a", "b", "c")
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
    used = found(path).read()
    assert not used.is_whole
    kept = [each for number, each in enumerate("abc") if number != place // ENTRY_BYTES]
    assert all(each in used for each in kept)


def test_a_file_that_can_not_be_read_is_not_whole(tmp_path: Path) -> None:
    """A link in its place is not followed."""
    target, path = tmp_path / "target", tmp_path / "x.ids"
    stored(target, "a")
    path.symlink_to(target)
    assert not found(path).read().is_whole


def test_a_failed_write_leaves_room_for_the_next(tmp_path: Path) -> None:
    """An empty file that a failure left, and an entry it left half of, are in nobody's way."""
    path = tmp_path / "x.ids"
    path.touch()
    file = UsedIdsFile(path)
    file.found()
    assert len(file.read()) == 0
    file.append([digest_of("a")])
    assert "a" in found(path).read()


def test_a_client_can_tell_an_id_that_the_server_made() -> None:
    """Each is new, and no other text has the form."""
    made = {make_exec_id() for _ in range(100)}
    assert len(made) == 100
    assert all(is_made(each) for each in made)
    others = ["", "run-", "a" * 16, "run-" + "a" * 15, "run-" + "a" * 17, "run-" + "A" * 16, "run-" + "a" * 16 + "\n"]
    assert not any(is_made(each) for each in others)
