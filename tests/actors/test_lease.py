"""The lease, on a virtual clock: renewal, activity, the hard end."""

from __future__ import annotations

import trio
import trio.testing

from sandkasten.actors.lease import WARNING_S, Lease


async def _ends(lease: Lease, seconds: float) -> list[float]:
    """Return at which times, from now, the lease said that it ended, watched for so long."""
    began, ends = trio.current_time(), []

    async def note() -> None:
        ends.append(trio.current_time() - began)
        await trio.sleep(1000)

    with trio.move_on_after(seconds):
        await lease.watch(note, lambda _remaining_s: None)
    return ends


async def test_an_idle_lease_ends_after_its_time_to_live(autojump_clock: trio.testing.MockClock) -> None:
    """Not before and not much later."""
    lease = Lease()
    assert lease.renew(ttl_s=60, lifetime_left_s=None) == 60
    assert await _ends(lease, 900) == [60]
    assert lease.has_ended


async def test_a_renewal_moves_the_end_while_it_is_watched(autojump_clock: trio.testing.MockClock) -> None:
    """The watcher needs no wake-up to learn of it."""
    lease = Lease()
    lease.renew(ttl_s=60, lifetime_left_s=None)

    async def renew_later() -> None:
        await trio.sleep(50)
        lease.renew(ttl_s=60, lifetime_left_s=None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(renew_later)
        assert await _ends(lease, 900) == [110]


async def test_activity_holds_the_idle_end_off_and_not_the_hard_one(autojump_clock: trio.testing.MockClock) -> None:
    """A running command keeps a session alive, up to its maximum lifetime."""
    lease = Lease()
    lease.active = 1
    lease.renew(ttl_s=10, lifetime_left_s=None)
    assert await _ends(lease, 900) == []
    lease.renew(ttl_s=10, lifetime_left_s=300)
    assert await _ends(lease, 900) == [300]


async def test_the_hard_end_is_not_moved_by_renewals(autojump_clock: trio.testing.MockClock) -> None:
    """What remains is the smaller of both."""
    lease = Lease()
    assert lease.renew(ttl_s=60, lifetime_left_s=100) == 60
    await trio.sleep(59)
    assert lease.renew(ttl_s=60, lifetime_left_s=41) == 41
    assert await _ends(lease, 900) == [41]


async def test_a_pause_lets_no_activity_hold_the_end_off(autojump_clock: trio.testing.MockClock) -> None:
    """What stands still is no activity; when it goes on it is again."""
    lease = Lease()
    lease.active = 1
    lease.renew(ttl_s=10, lifetime_left_s=None)
    lease.pause(stop=False)
    assert await _ends(lease, 900) == [10]
    lease.resume()
    lease.renew(ttl_s=10, lifetime_left_s=None)
    assert await _ends(lease, 900) == []


async def test_a_stopped_lease_ends_only_with_the_hard_end(autojump_clock: trio.testing.MockClock) -> None:
    """The idle end comes no nearer."""
    lease = Lease()
    lease.renew(ttl_s=10, lifetime_left_s=None)
    lease.pause(stop=True)
    assert await _ends(lease, 900) == []
    lease.renew(ttl_s=10, lifetime_left_s=300)
    assert await _ends(lease, 900) == [300]


async def _warnings(lease: Lease, seconds: float) -> list[tuple[float, float]]:
    """Return when the end was announced, and how much it was said to be away."""
    began, warnings = trio.current_time(), []

    async def wait() -> None:
        await trio.sleep(1000)

    with trio.move_on_after(seconds):
        await lease.watch(wait, lambda remaining_s: warnings.append((trio.current_time() - began, remaining_s)))
    return warnings


async def test_the_end_is_announced_a_minute_before(autojump_clock: trio.testing.MockClock) -> None:
    """Once, with what remains."""
    lease = Lease()
    lease.renew(ttl_s=100, lifetime_left_s=None)
    assert await _warnings(lease, 900) == [(40, WARNING_S)]


async def test_a_renewal_takes_the_warning_back(autojump_clock: trio.testing.MockClock) -> None:
    """The next warning is a minute before the new end."""
    lease = Lease()
    lease.renew(ttl_s=100, lifetime_left_s=None)

    async def renew_later() -> None:
        await trio.sleep(50)
        lease.renew(ttl_s=100, lifetime_left_s=None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(renew_later)
        assert await _warnings(lease, 900) == [(40, WARNING_S), (90, WARNING_S)]


async def test_a_short_lease_is_not_announced(autojump_clock: trio.testing.MockClock) -> None:
    """Every renewal would be a warning."""
    lease = Lease()
    lease.renew(ttl_s=30, lifetime_left_s=None)
    assert await _warnings(lease, 900) == []
