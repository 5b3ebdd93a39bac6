"""The list of sessions page by page, whatever happens between two pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric

from sandkasten.actors.core import AT_ONCE, Ref
from sandkasten.actors.node.sessions import list_sessions, merge
from sandkasten.actors.node_view import MetricSources, measure
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.store import Store
from sandkasten.config import RunsSettings
from sandkasten.counters.metrics import Metrics
from sandkasten.journal.ring import Journal
from sandkasten.model import Session, Status
from sandkasten.model.lifecycle import ENDED, LIVE
from sandkasten.model.listing import LabelSelector, SessionPage, SessionQuery, page_of, parse_cursor, place_of
from sandkasten.output.store import OutputStore
from sandkasten.store import sessions as sql
from sandkasten.store.database import open_database
from sandkasten.store.sessions import put_session
from tests.strategies import make_record

START = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
EPOCH, END = datetime(1970, 1, 1), datetime(9999, 12, 31)
EVERYTHING = frozenset(Status)
LABELS: tuple[dict[str, str], ...] = ({}, {"team": "a"}, {"team": "b"}, {"team": "a", "user": ""})
SELECTORS = (
    (),
    (LabelSelector("team"),),
    (LabelSelector("team", "a"),),
    (LabelSelector("team", "a"), LabelSelector("user")),
    (LabelSelector("user", ""),),
    (LabelSelector("nobody"),),
)


class _Node:
    """Sessions as a node has them: those that live in memory, those that ended in its database."""

    def __init__(self, path: Path) -> None:
        self.database = open_database(path)
        self.live: dict[str, Session] = {}
        self.all: dict[str, Session] = {}
        self._numbers = count()

    def create(self, age_s: int, labels: int) -> None:
        """Make a session; those of equal age are told apart by their ids."""
        session_id = f"{next(self._numbers) * 7919 % 10_007:024x}"
        made_at = START - timedelta(seconds=age_s)
        record = make_record(session_id, labels=LABELS[labels], created_at=made_at)
        self.live[session_id] = self.all[session_id] = record.session
        put_session(self.database, record)

    def end(self, index: int) -> None:
        """Let one that lives end."""
        if self.live:
            session = self.live.pop(sorted(self.live)[index % len(self.live)])
            ended = attrs.evolve(session, status=Status.EXPIRED)
            self.all[session.id] = ended
            put_session(self.database, attrs.evolve(make_record(session.id), session=ended))

    def find(self, query: SessionQuery) -> SessionPage:
        return merge(query, sql.find_sessions(self.database, query), self.live.values())


@contextmanager
def _node() -> Iterator[_Node]:
    """Not in memory: what opens a database makes its file first."""
    with TemporaryDirectory() as directory:
        node = _Node(Path(directory, "state.db"))
        with closing(node.database):
            yield node


@pytest.fixture(autouse=True)
def few_at_a_time() -> Iterator[None]:
    """Make small numbers of sessions many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql, "MAX_LOOKED_AT", 4)
        yield


SESSIONS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=16)
MEANWHILE = st.lists(st.tuples(st.sampled_from(["create", "end"]), st.integers(0, 20)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(sessions=SESSIONS, meanwhile=MEANWHILE, labels=st.sampled_from(SELECTORS), limit=st.integers(1, 5))
def test_pages_show_everything_once_whatever_happens_between_them(
    sessions: list[tuple[int, int, bool]],
    meanwhile: list[tuple[str, int]],
    labels: tuple[LabelSelector, ...],
    limit: int,
) -> None:
    """All that there was, in one order, nothing twice, no page too long, and only what was asked for."""
    with _node() as node:
        for age_s, kind, has_ended in sessions:
            node.create(age_s, kind)
            if has_ended:
                node.end(kind)
        query = SessionQuery(EVERYTHING, labels, limit=limit)
        wanted = {session.id for session in node.all.values() if query.matches(session)}
        seen: list[Session] = []
        while True:
            page = node.find(query)
            assert len(page.sessions) <= limit
            seen += page.sessions
            if page.next is None:
                break
            query = attrs.evolve(query, after=parse_cursor(page.next.cursor))
            for act, number in meanwhile[:2]:
                node.create(-number - 1, number % 4) if act == "create" else node.end(number)
            meanwhile = meanwhile[2:]
    places = [place_of(session) for session in seen]
    assert places == sorted(set(places), reverse=True)
    assert wanted <= {session.id for session in seen}
    assert all(query.matches(session) for session in seen)


@given(
    st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31)), st.text("0123456789abcdef", min_size=16, max_size=32)
)
def test_a_cursor_is_exact_to_the_microsecond(moment: datetime, session_id: str) -> None:
    """Also after a detour through the database's floating point."""
    session = make_record(session_id, created_at=moment.replace(tzinfo=UTC)).session
    place = place_of(session)
    assert parse_cursor(place.cursor) == place
    assert place.created_at == session.created_at
    if session.created_at.year < 2100:  # the number of microseconds a double tells apart ends long after that
        assert datetime.fromtimestamp(place.created_at.timestamp(), UTC) == session.created_at


@given(st.text(max_size=60))
def test_what_is_no_cursor_is_refused(text: str) -> None:
    """A text is either refused or a cursor that names a place and is written the same way again."""
    try:
        place = parse_cursor(text)
    except ValueError:
        return
    assert place.cursor == text


@pytest.mark.parametrize("text", ["", "x", "0" * 15, "f" * 15 + "-" + "a" * 24, "0" * 15 + "-" + "A" * 24])
def test_a_cursor_beyond_all_time_is_none(text: str) -> None:
    """A cursor beyond all time would be an overflow further on."""
    with pytest.raises(ValueError, match="no cursor"):
        parse_cursor(text)


def test_live_sessions_need_no_database() -> None:
    """The usual list is of memory alone, and has a limit as well."""
    sessions = [
        make_record(f"{number:024x}", created_at=START + timedelta(seconds=number)).session for number in range(5)
    ]
    page = page_of(SessionQuery(LIVE, limit=2), sessions)
    assert [session.id for session in page.sessions] == [f"{4:024x}", f"{3:024x}"]
    assert page.next == place_of(sessions[3])
    rest = page_of(SessionQuery(LIVE, after=page.next), sessions)
    assert ([session.id[-1] for session in rest.sessions], rest.next) == (["2", "1", "0"], None)
    assert page_of(SessionQuery(ENDED), sessions) == SessionPage([])


def test_what_is_looked_at_for_one_page_is_bounded() -> None:
    """A label that nobody has: pages without sessions, each with a place to go on from, until the end."""
    with _node() as node:
        for number in range(20):
            node.create(number, 0)
            node.end(0)
        query = SessionQuery(EVERYTHING, (LabelSelector("nobody"),))
        pages = 0
        while (page := node.find(query)).next is not None:
            assert page.sessions == []
            query = attrs.evolve(query, after=page.next)
            pages += 1
        assert pages == 5


# Many sessions --------------------------------------------------------------------------------------------------


class Counted:
    """Sessions of a directory, and queues of runs, that count how often they are looked at."""

    def __init__(self, sessions: int) -> None:
        self.directory, self.metrics, self._looks, self._most = SessionDirectory(), Metrics(), 0, 0
        self._queues = [_Queue(self._look) for _ in range(sessions)]
        for number, queue in enumerate(self._queues):
            session = make_record(f"{number:024x}", labels=LABELS[number % 4], created_at=START).session
            self.directory.add(session.id, Ref("session"), partial(self._look, session))
            self.metrics.queues.add(queue)

    def _look(self, shown: Any) -> Any:
        self._looks += 1
        return shown

    async def most_in_a_row(self, act: Callable[[], Awaitable[object]]) -> int:
        """Return the most looks of an act between two turns of another task."""
        self._most = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_turns)
            await trio.lowlevel.checkpoint()
            await act()
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        return self._most

    async def _take_turns(self) -> None:
        while True:
            before = self._looks
            await trio.lowlevel.checkpoint()
            self._most = max(self._most, self._looks - before)


class _Queue:
    queued = 0

    def __init__(self, look: Callable[[int], int]) -> None:
        self._look = look

    @property
    def running(self) -> int:
        return self._look(1)


@pytest.mark.parametrize(
    "query",
    [
        SessionQuery(),
        SessionQuery(limit=10, after=parse_cursor(f"{'f' * 12:0>15}-{'a' * 24}")),
        SessionQuery(labels=SELECTORS[3]),
        SessionQuery(EVERYTHING),
    ],
    ids=["live", "page", "labels", "all"],
)
async def test_a_list_of_many_sessions_gives_others_their_turns(
    query: SessionQuery, tmp_path: Path, nursery: trio.Nursery
) -> None:
    """A hundred are looked at in one turn. Another task may have the first turn of a round and the last of the next."""
    counted = Counted(1000)
    store: Ref = await nursery.start(Store(Ref("store"), tmp_path / "test.db").run)
    ask = partial(list_sessions, query, directory=counted.directory, store=store)
    assert 0 < await counted.most_in_a_row(ask) <= 2 * AT_ONCE


async def test_the_metrics_of_many_sessions_give_others_their_turns(tmp_path: Path) -> None:
    """As a list does, and so do the queues of runs."""
    counted = Counted(1000)
    seen = MetricSources(
        metrics=counted.metrics,
        directory=counted.directory,
        journal=Journal(),
        output=OutputStore.configured(tmp_path, RunsSettings()),
        parts=(),
        nsinit=Ref("nsinit"),
        data_dir=tmp_path,
        cgroup_dirs={},
        node_id="n-1",
    )
    found: list[Metric] = []

    async def scrape() -> None:
        found.extend(await measure(seen, limiter=trio.CapacityLimiter(1)))

    assert 0 < await counted.most_in_a_row(scrape) <= 2 * AT_ONCE
    samples = {(each.name, *each.labels.values()): each.value for family in found for each in family.samples}
    assert samples["sandkasten_sessions", "running"] == samples["sandkasten_runs", "running"] == 1000
