"""The lease, on a virtual clock: renewal, activity, the hard end."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from sandkasten.actors.session.lease import WARNING_S, Lease
from sandkasten.model import FOREVER_S, EndReason


async def _ends(lease: Lease, seconds: float) -> list[float]:
    """Return at which times, from now, the lease said that it ended, watched for so long."""
    began, ends = trio.current_time(), []

    async def note() -> None:
        ends.append(trio.current_time() - began)
        await trio.sleep(1000)

    with trio.move_on_after(seconds):
        await lease.watch(note, lambda _reason, _remaining_s: None)
    return ends


async def test_an_idle_lease_ends_after_its_time_to_live(autojump_clock: trio.testing.MockClock) -> None:
    """Not before and not much later."""
    lease = Lease()
    assert lease.renew(ttl_s=60, hard_end=FOREVER_S) == 60
    assert await _ends(lease, 900) == [60]
    assert lease.has_ended


async def test_a_renewal_moves_the_end_while_it_is_watched(autojump_clock: trio.testing.MockClock) -> None:
    """The watcher wakes up at the earlier end, and reports no end then."""
    lease = Lease()
    lease.renew(ttl_s=60, hard_end=FOREVER_S)

    async def renew_later() -> None:
        await trio.sleep(50)
        lease.renew(ttl_s=60, hard_end=FOREVER_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(renew_later)
        assert await _ends(lease, 900) == [110]


async def test_activity_holds_the_idle_end_off_and_not_the_hard_one(autojump_clock: trio.testing.MockClock) -> None:
    """A running command keeps a session alive, up to its maximum lifetime."""
    lease = Lease()
    lease.begin_activity()
    lease.renew(ttl_s=10, hard_end=FOREVER_S)
    assert await _ends(lease, 900) == []
    lease.renew(ttl_s=10, hard_end=trio.current_time() + 300)
    assert await _ends(lease, 900) == [300]


async def test_the_hard_end_is_not_moved_by_renewals(autojump_clock: trio.testing.MockClock) -> None:
    """The time left is the smaller of lease and hard end."""
    lease = Lease()
    assert lease.renew(ttl_s=60, hard_end=trio.current_time() + 100) == 60
    await trio.sleep(59)
    assert lease.renew(ttl_s=60, hard_end=trio.current_time() + 41) == 41
    assert await _ends(lease, 900) == [41]


async def test_a_pause_lets_no_activity_hold_the_end_off(autojump_clock: trio.testing.MockClock) -> None:
    """A paused activity does not hold the end off; a resumed one does again."""
    lease = Lease()
    lease.begin_activity()
    lease.renew(ttl_s=10, hard_end=FOREVER_S)
    lease.pause(stop=False)
    assert await _ends(lease, 900) == [10]
    lease.resume()
    lease.renew(ttl_s=10, hard_end=FOREVER_S)
    assert await _ends(lease, 900) == []


async def test_a_stopped_lease_ends_only_with_the_hard_end(autojump_clock: trio.testing.MockClock) -> None:
    """The idle end comes no nearer."""
    lease = Lease()
    lease.renew(ttl_s=10, hard_end=FOREVER_S)
    lease.pause(stop=True)
    assert await _ends(lease, 900) == []
    lease.renew(ttl_s=10, hard_end=trio.current_time() + 300)
    assert await _ends(lease, 900) == [300]


async def _warnings(lease: Lease, seconds: float) -> list[tuple[EndReason, float, float]]:
    """Return which end was announced, when, and how much it was said to be away."""
    began, warnings = trio.current_time(), []

    async def wait() -> None:
        await trio.sleep(1000)

    def note(reason: EndReason, remaining_s: float) -> None:
        warnings.append((reason, trio.current_time() - began, remaining_s))

    with trio.move_on_after(seconds):
        await lease.watch(wait, note)
    return warnings


async def test_the_end_is_announced_a_minute_before(autojump_clock: trio.testing.MockClock) -> None:
    """Once, with what remains."""
    lease = Lease()
    lease.renew(ttl_s=100, hard_end=FOREVER_S)
    assert await _warnings(lease, 900) == [(EndReason.IDLE, 40, WARNING_S)]


async def test_a_renewal_takes_the_warning_back(autojump_clock: trio.testing.MockClock) -> None:
    """The next warning is a minute before the new end."""
    lease = Lease()
    lease.renew(ttl_s=100, hard_end=FOREVER_S)

    async def renew_later() -> None:
        await trio.sleep(50)
        lease.renew(ttl_s=100, hard_end=FOREVER_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(renew_later)
        assert await _warnings(lease, 900) == [(EndReason.IDLE, 40, WARNING_S), (EndReason.IDLE, 90, WARNING_S)]


async def test_a_short_lease_is_not_announced(autojump_clock: trio.testing.MockClock) -> None:
    """Every renewal would be a warning."""
    lease = Lease()
    lease.renew(ttl_s=30, hard_end=FOREVER_S)
    assert await _warnings(lease, 900) == []


async def test_the_hard_end_is_announced_to_a_session_that_is_used_all_the_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Also when its idle end is always nearer than a minute; and with the idle end held off."""
    for active in (0, 1):
        lease = Lease()
        if active:
            lease.begin_activity()
        hard_end = trio.current_time() + 100
        lease.renew(ttl_s=30, hard_end=hard_end)

        async def use(lease: Lease = lease, hard_end: float = hard_end) -> None:
            for _ in range(4):
                await trio.sleep(20)
                lease.renew(ttl_s=30, hard_end=hard_end)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(use)
            assert await _warnings(lease, 99) == [(EndReason.MAX_LIFETIME, 40, WARNING_S)]


async def test_an_extended_life_is_announced_again(autojump_clock: trio.testing.MockClock) -> None:
    """The warning belongs to an end; a new end has one of its own."""
    lease = Lease()
    lease.begin_activity()
    lease.renew(ttl_s=10, hard_end=trio.current_time() + 100)

    async def extend() -> None:
        await trio.sleep(50)
        lease.renew(ttl_s=10, hard_end=trio.current_time() + 150)  # 50 have gone by

    async with trio.open_nursery() as nursery:
        nursery.start_soon(extend)
        warnings = await _warnings(lease, 900)
    assert warnings == [(EndReason.MAX_LIFETIME, 40, WARNING_S), (EndReason.MAX_LIFETIME, 140, WARNING_S)]


@pytest.mark.parametrize(
    ("ttl_s", "lifetime_s", "reason"),
    [
        (10, FOREVER_S, EndReason.IDLE),
        (10, 20, EndReason.IDLE),
        (20, 10, EndReason.MAX_LIFETIME),
        (10, 10, EndReason.MAX_LIFETIME),
        (FOREVER_S, 10, EndReason.MAX_LIFETIME),
    ],
)
async def test_a_lease_knows_which_of_its_ends_came(
    autojump_clock: trio.testing.MockClock, ttl_s: float, lifetime_s: float, reason: EndReason
) -> None:
    """The nearer one; of both at once, that which nothing could have held off."""
    lease = Lease()
    lease.renew(ttl_s=ttl_s, hard_end=trio.current_time() + lifetime_s)
    assert await _ends(lease, 900) == [10]
    assert lease.reason is reason


async def test_a_lease_without_end_never_ends(autojump_clock: trio.testing.MockClock) -> None:
    """Neither idle nor old, and it can be given an end later."""
    lease = Lease()
    assert lease.renew(ttl_s=FOREVER_S, hard_end=FOREVER_S) == FOREVER_S
    assert await _ends(lease, 10 * 366 * 86_400) == []
    lease.renew(ttl_s=10, hard_end=FOREVER_S)
    assert await _ends(lease, 900) == [10]
