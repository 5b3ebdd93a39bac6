"""The journal in memory: numbering, the ring, the floor, who is woken, and data that stays small whatever it is."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkasten.errors import Capacity, InvalidRequest
from sandkasten.journal.fields import EVENT_FIELDS, MAX_DATA_BYTES, bounded_data
from sandkasten.journal.ring import CROWD_EVENTS, MAX_READERS, OLDEST, Journal
from sandkasten.model import Event, EventType

A, B = "a" * 24, "b" * 24


def make_journal(*, epoch: int = 7, memory_events: int = 8, floor: str | None = "") -> Journal:
    journal = Journal(memory_events=memory_events)
    journal.open(epoch, floor)
    return journal


def emit(journal: Journal, count: int = 1, session_id: str = A) -> None:
    for _ in range(count):
        journal.emit(EventType.PORT_OPENED, session_id, port=journal_number(journal) + 1, address="::")


def journal_number(journal: Journal) -> int:
    return int(journal.head.partition("-")[2], 16)


def write_all(journal: Journal) -> list[Event]:
    """Take everything that is to be written, as if a database took it."""
    written: list[Event] = []
    while (batch := journal.unwritten(limit=3)) is not None:
        written += batch.events
        journal.was_written(batch, rows=len(batch.events))
    return written


def test_an_event_is_told_with_cursor_and_time_at_once() -> None:
    """The event that a reader gets is complete the moment `emit` returns."""
    journal = make_journal()
    start = journal.head
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    journal.emit(EventType.EXEC_STARTED, A, exec_id="x", shell="default", timeout_ms=None)
    (event,), position = journal.page(start, None, limit=10)
    assert (event.type, event.session_id, event.data) == (
        EventType.EXEC_STARTED,
        A,
        {"exec_id": "x", "shell": "default"},
    )
    assert before <= event.time <= datetime.now(UTC)
    assert event.time.microsecond % 1000 == 0
    assert start < event.cursor == position == journal.head


def test_cursors_are_ordered_as_text_within_and_across_epochs() -> None:
    """A client may compare them, and so does the database."""
    journal = make_journal(epoch=9, memory_events=300)
    first = journal.head
    emit(journal, 300)
    cursors = [event.cursor for event in journal.page(first, None, limit=300)[0]]
    assert cursors == sorted(set(cursors))
    assert max(cursors) < make_journal(epoch=10).head < make_journal(epoch=2**44).head


def test_a_page_is_bounded_and_goes_on_where_it_ended() -> None:
    """Following the positions hands out everything once."""
    journal = make_journal(memory_events=100)
    position, seen = journal.head, []
    emit(journal, 10)
    emit(journal, 5, B)
    for _ in range(4):
        events, position = journal.page(position, None, limit=4)
        assert len(events) <= 4
        seen += [event.data["port"] for event in events]
    assert seen == list(range(1, 16))
    assert journal.page(position, None, limit=4) == ([], position)


def test_a_page_of_one_session_moves_on_past_the_others() -> None:
    """The position says how far was looked, not only what was found."""
    journal = make_journal(memory_events=100)
    start = journal.head
    emit(journal, 5, B)
    events, position = journal.page(start, A, limit=100)
    assert (events, position) == ([], journal.head)


def test_only_so_much_stays_in_memory() -> None:
    """The ring keeps the newest; what is before them is said by `memory_start`."""
    journal = make_journal(memory_events=8)
    write_all(journal)
    for _ in range(20):
        emit(journal)
        write_all(journal)
    events, _ = journal.page(journal.memory_start, None, limit=100)
    assert [event.data["port"] for event in events] == list(range(13, 21))
    assert journal.floor == ""


def test_what_leaves_memory_unwritten_raises_the_floor() -> None:
    """The gap is known: nobody can read across it, and the database is told."""
    journal = make_journal(memory_events=8)
    emit(journal, 11)
    gap = journal.memory_start
    assert journal.floor == gap
    batch = journal.unwritten(limit=100)
    assert batch is not None
    assert (len(batch.events), batch.floor) == (8, gap)
    journal.was_written(batch, rows=8)
    assert journal.unwritten(limit=100) is None


@pytest.mark.parametrize(("more", "rest"), [(3, [5, 6, 7]), (9, [10, 11, 12, 13])])
def test_a_write_that_was_overtaken_is_no_harm(more: int, rest: list[int]) -> None:
    """Events come while a batch is being written: what is in memory is written once, and the floor stays known."""
    journal = make_journal(memory_events=4)
    emit(journal, 4)
    batch = journal.unwritten(limit=100)
    assert batch is not None
    emit(journal, more)
    floor = journal.floor
    journal.was_written(batch, rows=4)
    assert [event.data["port"] for event in write_all(journal)] == rest
    assert floor == journal.floor < journal.head


def test_a_gap_that_grows_while_it_is_being_written_is_written_again() -> None:
    """The database is told of the newest floor, not only of the one it was given."""
    journal = make_journal(memory_events=4)
    emit(journal, 6)
    batch = journal.unwritten(limit=100)
    assert batch is not None
    emit(journal, 8)
    journal.was_written(batch, rows=4)
    assert batch.floor is not None
    following = journal.unwritten(limit=100)
    assert following is not None
    assert batch.floor < journal.floor == following.floor


def test_a_new_database_knows_no_cursor_of_an_older_one() -> None:
    """Without a recorded floor, everything before the first epoch counts as forgotten, and that is written first."""
    journal = make_journal(epoch=50, floor=None)
    assert journal.floor == journal.head
    batch = journal.unwritten(limit=10)
    assert batch is not None
    assert (batch.events, batch.floor) == ([], journal.head)


def test_a_place_is_now_the_oldest_or_a_cursor_that_was_given() -> None:
    """Anything else is refused before something is read."""
    journal = make_journal(epoch=0xABC)
    emit(journal, 3)
    assert journal.place(None) == journal.head
    assert journal.place(OLDEST) == journal.floor
    assert journal.place(journal.memory_start) == journal.memory_start
    ahead = make_journal(epoch=0xABD).head
    for wrong in ("", "1", "00", "x" * 25, journal.head.upper(), journal.head + "\n", f" {journal.head}", ahead):
        with pytest.raises(InvalidRequest) as error:
            journal.place(wrong)
        assert "cursor" in error.value.details


def test_readers_are_woken_for_their_session_alone_and_now_and_then_for_all() -> None:
    """A command of one session costs the readers of the others nothing."""
    journal = make_journal(memory_events=40)
    everything, mine, other = (journal.listen(each) for each in (None, A, B))
    emit(journal, 2)
    assert journal.has_news.is_set()
    journal.announce()
    assert [each.woken.is_set() for each in (everything, mine, other)] == [True, True, False]
    assert not journal.has_news.is_set()
    emit(journal, 10)
    journal.announce()
    assert other.woken.is_set()


def test_who_left_is_not_woken_and_nobody_costs_nothing() -> None:
    """Without readers no task is woken for an event."""
    journal = make_journal()
    listener = journal.listen(None)
    journal.leave(listener)
    journal.leave(listener)
    emit(journal)
    journal.announce()
    assert (listener.woken.is_set(), journal.has_news.is_set()) == (False, False)


def test_readers_are_bounded_and_room_comes_back() -> None:
    """One more than the bound is refused as not now."""
    journal = make_journal()
    listeners = [journal.listen(None) for _ in range(MAX_READERS)]
    with pytest.raises(Capacity):
        journal.listen(None)
    journal.leave(listeners[0])
    journal.listen(None)


def test_a_crowd_of_unwritten_events_is_said() -> None:
    """The writer need not wait for its usual moment."""
    journal = make_journal(memory_events=4 * CROWD_EVENTS)
    emit(journal, CROWD_EVENTS - 1)
    assert (journal.to_write.is_set(), journal.is_crowded.is_set()) == (True, False)
    emit(journal)
    assert journal.is_crowded.is_set()
    write_all(journal)
    assert (journal.to_write.is_set(), journal.is_crowded.is_set()) == (False, False)


def test_a_field_that_is_not_documented_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing reaches disk or readers by accident; the log names the field, once, and never its value."""
    journal = make_journal()
    start = journal.head
    for _ in range(2):
        journal.emit(EventType.EXEC_STARTED, A, exec_id="x", environment="secret")
    assert [event.data for event in journal.page(start, None, limit=9)[0]] == [{"exec_id": "x"}] * 2
    assert journal.unknown_fields == {(EventType.EXEC_STARTED, "environment")}
    assert [record.message for record in caplog.records] == ["event_field_unknown"]
    assert "secret" not in str(vars(caplog.records[0]))


def test_every_type_has_its_list_of_fields() -> None:
    """No list can be forgotten."""
    assert set(EVENT_FIELDS) == set(EventType)


def test_an_event_before_the_first_epoch_is_a_bug() -> None:
    """An event before the first epoch would get a cursor that comes again."""
    with pytest.raises(AssertionError):
        Journal().emit(EventType.OOM, A)


def test_data_is_a_copy() -> None:
    """A later change of a list by its maker does not change the event."""
    values = {"victim": ["python"]}
    data = bounded_data(values)
    values["victim"].append("more")
    assert data == {"victim": ["python"]}


@pytest.mark.parametrize(
    "victim",
    [
        "x" * 100_000,
        "\U0001f600" * 20_000,
        "\udcff" * 5000,
        "\x00\x1b\u2028" * 3000,
        ["long" * 100] * 1000,
        {f"key {number}": "x" * 1000 for number in range(1000)},
        [[[[[[[["deep"] * 9] * 9] * 9] * 9] * 9]]],
    ],
    ids=["long", "wide", "surrogates", "controls", "list", "object", "deep"],
)
def test_data_that_is_too_large_is_cut_and_says_so(victim: object) -> None:
    """Names from inside a sandbox can't make an event grow; short fields stay whole."""
    data = bounded_data({"exec_id": "x" * 20, "victim": victim})
    assert len(json.dumps(data, separators=(",", ":"))) <= MAX_DATA_BYTES
    assert data["truncated"] is True
    assert data["exec_id"] == "x" * 20
    assert data["victim"]
    json.dumps(data).encode()


def test_data_that_just_fits_is_not_cut() -> None:
    """Data that fits is left whole even if it would not fit with every character escaped."""
    data = bounded_data({"victim": "x" * (MAX_DATA_BYTES - 13)})
    assert data == {"victim": "x" * (MAX_DATA_BYTES - 13)}
    assert bounded_data({"victim": "x" * (MAX_DATA_BYTES - 12)})["truncated"] is True


_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=400)
    | st.binary(max_size=20)
    | st.datetimes(),
    lambda members: (
        st.lists(members, max_size=20)
        | st.dictionaries(st.text(st.characters(), max_size=20) | st.integers(), members, max_size=20)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=60,
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["victim", "reason", "cause"]), _ANYTHING))
def test_any_data_becomes_small_strict_json(given: dict[str, object]) -> None:
    """Bounded data has no refusal, no NaN and no lone surrogate, is within the bound, and is the same after a trip as
    text.
    """
    data = bounded_data(given)
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False)
    assert len(encoded) <= MAX_DATA_BYTES
    encoded.encode("ascii")
    json.dumps(data, ensure_ascii=False).encode()
    assert json.loads(encoded) == data


def test_numbers_that_json_lacks_are_told_in_another_way() -> None:
    """An integer too long for many readers becomes text, an infinity does not stay one."""
    data = bounded_data({"victim": 2**70, "exec_id": math.inf})
    assert data["victim"] == str(2**70)
    assert data["exec_id"] in (None, "inf")
