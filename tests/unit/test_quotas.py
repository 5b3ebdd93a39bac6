"""Quotas of keys: sums are right whatever happens in whatever order, and rates are what they say."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from copy import copy
from functools import partial

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.admission.keys import KeyRing
from sandkasten.admission.quotas import KeyShares
from sandkasten.errors import QuotaExceeded
from sandkasten.model import Limits
from sandkasten.model.keys import Access, ApiKey, Quota
from tests.api.keys import issue
from tests.strategies import make_record


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shares_of(*keys: ApiKey, clock: Clock | None = None, runs_of: Callable[..., int] = lambda _: 0) -> KeyShares:
    ring = KeyRing()
    ring.replace(keys)
    return KeyShares(ring, runs_of=runs_of, clock=clock or Clock())


def key_with(**quota: float) -> ApiKey:
    return issue(Access.WRITE, quota=Quota(**quota)).key  # type: ignore[arg-type]  # cpu is the only float


@pytest.mark.parametrize(
    ("quota", "name"),
    [
        ({"sessions": 2}, "sessions"),
        ({"cpu": 2.5}, "cpu"),
        ({"memory_mb": 250}, "memory_mb"),
        ({"disk_mb": 250}, "disk_mb"),
    ],
)
def test_what_fits_is_let_in_and_what_does_not_is_told(quota: dict[str, float], name: str) -> None:
    """Two sessions fit and a third does not, until one is gone; other keys and no key are not concerned."""
    key, other = key_with(**quota), key_with()
    shares = shares_of(key, other)
    limits = Limits(cpu=1.0, memory_mb=100, disk_mb=100)
    for session in ("a", "b"):
        shares.check_create(key.id, limits)
        shares.hold(session, key.id, limits)
    with pytest.raises(QuotaExceeded) as caught:
        shares.check_create(key.id, limits)
    assert caught.value.details["quota"] == name
    assert caught.value.details["total"] == quota[name]
    assert caught.value.retryable
    for owner in (other.id, "configured", "0123456789ab", None):
        shares.check_create(owner, limits)
    shares.release("a")
    shares.check_create(key.id, limits)


def test_a_change_counts_for_who_made_the_session() -> None:
    """A change that asks for no more always goes, also above a quota that was made smaller."""
    key = key_with(memory_mb=250)
    shares = shares_of(key)
    limits = Limits(memory_mb=100)
    for session in ("a", "b"):
        shares.hold(session, key.id, limits)
    shares.check_change("a", attrs.evolve(limits, memory_mb=150))
    with pytest.raises(QuotaExceeded):
        shares.check_change("a", attrs.evolve(limits, memory_mb=151))
    shares.ring.replace([attrs.evolve(key, quota=Quota(memory_mb=50))])
    shares.check_change("a", attrs.evolve(limits, memory_mb=99))
    with pytest.raises(QuotaExceeded):
        shares.check_change("a", attrs.evolve(limits, memory_mb=101))
    shares.check_change("unknown", attrs.evolve(limits, memory_mb=10_000))


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["aaaaaaaaaaaa", "bbbbbbbbbbbb", None]), st.integers(0, 300)),
        max_size=40,
    )
)
def test_sums_are_those_of_what_is_held(steps: list[tuple[int, str | None, int]]) -> None:
    """Held again with other limits or another maker, released twice, never held: compared with a plain dictionary."""
    shares, model = shares_of(), dict[int, tuple[str, int]]()
    for session, owner, memory_mb in steps:
        if memory_mb == 0:
            shares.release(session)
            model.pop(session, None)
        else:
            shares.hold(session, owner, Limits(memory_mb=memory_mb))
            model.pop(session, None)
            if owner is not None:
                model[session] = (owner, memory_mb)
    for owner in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        usage = shares.usage(attrs.evolve(key_with(), id=owner))
        amounts = [memory_mb for held_by, memory_mb in model.values() if held_by == owner]
        assert (usage.sessions, usage.memory_mb) == (len(amounts), sum(amounts))
    assert all(shares.owner_of(session) == owner for session, (owner, _) in model.items())


def test_creates_per_minute_are_counted_per_key() -> None:
    """A create over the quota is 429 with the seconds until the next; a key without such a quota is not counted."""
    clock = Clock()
    key, free = key_with(creates_per_minute=2), key_with()
    shares = shares_of(key, free, clock=clock)
    for _ in range(2):
        shares.take_create(key.id)
    with pytest.raises(QuotaExceeded) as caught:
        shares.take_create(key.id)
    assert (caught.value.retry_after_s, caught.value.details) == (30, {"quota": "creates_per_minute", "total": 2})
    for _ in range(10):
        shares.take_create(free.id)
        shares.take_create(None)
    clock.now_s = 30
    shares.take_create(key.id)


def test_a_quota_of_nothing_lets_nothing_through() -> None:
    """Zero is a limit, not the lack of one."""
    key = key_with(sessions=0, creates_per_minute=0, requests_per_second=0, execs=0)
    shares = shares_of(key)
    with pytest.raises(QuotaExceeded):
        shares.check_create(key.id, Limits())
    with pytest.raises(QuotaExceeded):
        shares.take_create(key.id)
    with pytest.raises(QuotaExceeded):
        shares.take_request(key)
    with pytest.raises(QuotaExceeded):
        shares.check_run(key.id)


def test_runs_are_counted_over_all_sessions_of_a_key() -> None:
    """As many as its quota says, and for others without end."""
    key, free = key_with(execs=3), key_with()
    shares_of(key, free, runs_of=lambda _: 2).check_run(key.id)
    shares = shares_of(key, free, runs_of=lambda _: 3)
    with pytest.raises(QuotaExceeded):
        shares.check_run(key.id)
    shares.check_run(free.id)
    shares.check_run(None)


def test_only_sessions_of_the_key_are_looked_at() -> None:
    """A command, and a row in the list of keys, costs no walk over the sessions of others."""
    key, other = key_with(execs=2), key_with(execs=2)
    directory, asked = SessionDirectory(), list[Hashable]()

    def runs_of(sessions: Iterable[Hashable]) -> int:
        asked.extend(sessions)
        return directory.runs_of(sessions)

    shares, ids = shares_of(key, other, runs_of=runs_of), [f"{number:024x}" for number in range(4)]
    for session_id, owner in zip(ids, (key.id, other.id, None, other.id), strict=True):
        session = make_record(session_id).session
        directory.add(session_id, Ref("session"), partial(copy, session), running=lambda: ["e-1"])
        shares.hold(session_id, owner, session.limits)
    shares.hold(None, key.id, Limits())  # one that has no id yet
    assert shares.usage(key).execs == 1
    shares.check_run(key.id)
    assert asked == [ids[0], None] * 2
    with pytest.raises(QuotaExceeded):
        shares.check_run(other.id)
    assert asked[4:] == [ids[1], ids[3]]
