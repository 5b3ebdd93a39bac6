"""The file of keys is followed: what is written there is in force, and what can't be believed gives no key."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio

from sandkasten.admission.keys import LOOK_EVERY_S, KeyRing, KeyWatch, write_keys
from tests.api.keys import READ, WRITE
from tests.waiting import until


async def test_a_change_of_the_file_is_in_force_within_a_second(tmp_path: Path) -> None:
    """Made after the start, changed, and taken away again, without a signal to anybody."""
    path, ring = tmp_path / "keys.json", KeyRing()

    async def holds_both() -> bool:
        return set(ring.keys) == {READ.key.id, WRITE.key.id}

    async def holds_one() -> bool:
        return set(ring.keys) == {WRITE.key.id}

    async with trio.open_nursery() as nursery:
        await nursery.start(KeyWatch(ring, path).run)
        assert not ring.keys
        began = trio.current_time()
        write_keys(path, [READ.key, WRITE.key])
        await until(holds_both)
        assert trio.current_time() - began < LOOK_EVERY_S + 0.5
        write_keys(path, [WRITE.key])
        await until(holds_one)
        nursery.cancel_scope.cancel()


async def test_a_damaged_file_takes_the_keys_away_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the last good state: nobody knows what the change was to take away. Mended, it is believed again."""
    path, ring = tmp_path / "keys.json", KeyRing()
    write_keys(path, [READ.key])
    watch = KeyWatch(ring, path)
    await watch.look()
    assert list(ring.keys) == [READ.key.id]
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await watch.look()
    assert [record.message for record in caplog.records] == ["keys_refused"]
    assert not ring.keys
    assert ring.trouble is not None
    path.write_bytes(content)
    path.chmod(0o660)
    await watch.look()
    assert not ring.keys
    path.chmod(0o640)
    await watch.look()
    assert list(ring.keys) == [READ.key.id]
    assert ring.trouble is None
