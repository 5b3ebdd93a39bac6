"""Two nsinits on one machine: no range of ids is used by both, whichever of them dies and leaves its sessions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nsinit.kernel import slots
from nsinit.kernel.slots import FIRST_BASE, LAST_BASE, SIZE, RangeLocks, SlotTable, bases_in_use
from tests.kernel.harness import Nsinit, data_directory, host_plan, new_node_id, running

MANY = 6


def bases_of(nsinit: Nsinit) -> set[int]:
    """Build some sessions, and return the bases of all there are."""
    for _ in range(MANY):
        nsinit.build(host_plan())
    return {found.identity.base_uid for found in nsinit.scan().values() if found.identity is not None}


def test_two_nsinits_use_different_ids() -> None:
    """Sessions of two data directories share no uid, also when both are made at the same time."""
    with data_directory() as one, data_directory() as two, running(one) as first, running(two) as second:
        bases = bases_of(first), bases_of(second)
        assert [len(each) for each in bases] == [MANY, MANY]
        assert not bases[0] & bases[1]
        assert bases[0] | bases[1] <= bases_in_use()


def test_ids_of_a_killed_nsinits_sessions_stay_theirs() -> None:
    """Sessions outlive their nsinit, whose locks are gone then: another nsinit, also one that starts only now, does not
    use their ids, and the next nsinit of the same data directory does not use them twice."""
    node_id = new_node_id()
    with data_directory() as one, data_directory() as two, data_directory() as three, running(two) as other:
        first = Nsinit(one, node_id)
        orphans = bases_of(first)
        first.kill()
        try:
            assert not bases_of(other) & orphans
            with running(three) as late:
                assert not bases_of(late) & orphans
        finally:
            with running(one, node_id) as again:
                first.release_sandboxes()
                assert len(bases_of(again) | orphans) == 2 * MANY


def test_a_range_is_one_holders_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A locked range is refused to another holder until it is given back or the holder ends; others are free."""
    path = str(tmp_path_factory.mktemp("lease") / "ids")
    one, two = RangeLocks(path), RangeLocks(path)
    base = FIRST_BASE + 7 * SIZE
    assert one.lock(base)
    assert one.lock(base)
    assert not two.lock(base)
    assert two.lock(base + SIZE)
    one.unlock(base)
    assert two.lock(base)
    two.close()
    assert one.lock(base)
    one.close()


def test_one_look_at_the_machine_serves_many_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads a file of every process. A range that a process has ids of, or another nsinit, is left out and stays
    free for others."""
    looks: list[set[int]] = []

    def look() -> set[int]:
        looks.append(bases_in_use())
        return looks[-1]

    monkeypatch.setattr(slots, "bases_in_use", look)
    monkeypatch.setattr(slots, "FIRST_BASE", LAST_BASE - 90 * SIZE)
    first = slots.FIRST_BASE
    other = RangeLocks(str(tmp_path / "ids"))
    assert other.lock(first + SIZE)
    with subprocess.Popen(["/bin/sleep", "60"], user=first + 5) as process:
        try:
            table = SlotTable(RangeLocks(str(tmp_path / "ids")), reserved=(), taken=frozenset({first + 2 * SIZE}))
            for _ in range(3):
                table.make_spare()
            made = [table.take() for _ in range(3)]
        finally:
            process.kill()
    for slot in made:
        os.close(slot.userns_fd)
        os.close(slot.system_userns_fd)
    assert sorted(slot.base for slot in made) == [first + number * SIZE for number in (3, 4, 5)]
    assert len(looks) == 1
    assert other.lock(first)
    assert not other.lock(first + 6 * SIZE)
    table.close()
    other.close()
