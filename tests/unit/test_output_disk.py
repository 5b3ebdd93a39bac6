"""What is written down of runs: it comes back as it was, or not at all, whatever happened to the files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandkasten.output.run_archive import RunArchive, RunNews, SessionArchive, Written
from sandkasten.output.used_ids import digest_of

from sandkasten.model import Cause, ExecEnd, ExecKind, Output, Stream, TerminalSize, Usage
from sandkasten.output import run_archive
from sandkasten.output.records import (
    BadRecord,
    RunFacts,
    RunState,
    Seal,
    facts_from_json,
    facts_to_json,
    state_from_json,
    state_to_json,
)
from tests.stores import file_size_limit

SESSION = "a" * 24
OTHER = "b" * 24
MB = 1024 * 1024
MOMENT = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
KEY = bytes(32)

FACTS = RunFacts(
    exec_id="run/1",
    kind=ExecKind.COMMAND,
    shell="default",
    digest=b"\x01\xff",
    command="echo \udcff 'ü'",
    created_at=MOMENT,
    timeout_ms=1000,
    is_detached=True,
    keep_alive=False,
    is_interactive=False,
    size=TerminalSize(80, 24),
    input="given",
    group=None,
    readings=(1, -1, 3, 4, 5, 1),
)
USAGE = Usage(1, 2, 3)
END = ExecEnd("run/1", 137, 9, Cause.OOM, "/tmp/\udcff", 12, None, shell_restarted=True, usage=USAGE, victim="v")
ENDED = RunState(MOMENT, 7, END, MOMENT, last_sequence=4, stdout_bytes=12, stderr_bytes=4)


def open_archive(root: Path, *, session_bytes: int = 64 * MB, total_bytes: int = 1024 * MB) -> SessionArchive:
    archive = RunArchive(root, session_bytes=session_bytes, total_bytes=total_bytes)
    archive.open({SESSION})
    return archive.session(SESSION)


def pieces(first: int, *texts: bytes, stream: Stream = Stream.STDOUT) -> Sequence[Output]:
    return [Output(stream, text, first + number) for number, text in enumerate(texts)]


def news(exec_id: str, state: RunState | None = None, output: Sequence[Output] = (), offset: int = 0) -> RunNews:
    facts = facts_to_json(attrs.evolve(FACTS, exec_id=exec_id))
    return RunNews(exec_id, facts if state is not None else None, state, offset, 0, output)


def data_of(written: Written, exec_id: str) -> bytes:
    return b"".join(piece.data for chunk in written.runs[exec_id].chunks for piece in chunk.pieces())


def test_facts_and_states_come_back_as_they_were() -> None:
    """Every field of them, in every shape it has."""
    other = attrs.evolve(FACTS, shell=None, size=None, timeout_ms=None, group="g1", input="none", readings=())
    assert [facts_from_json(facts_to_json(each)) for each in (FACTS, other)] == [FACTS, other]
    assert [state_from_json(state_to_json(each)) for each in (ENDED, RunState())] == [ENDED, RunState()]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b"\xff", b'{"id": 1}', b"[" * 100_000])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    """One kind of error, whatever it is instead."""
    with pytest.raises(BadRecord):
        facts_from_json(data)
    with pytest.raises(BadRecord):
        state_from_json(data)


def test_only_the_daemon_makes_tickets() -> None:
    """One that was changed, is of another session or of another key is none."""
    seal = Seal(KEY, SESSION)
    ticket = seal.ticket(facts_to_json(FACTS))
    assert seal.read(ticket) == FACTS
    others = [ticket[:-1], ticket + " ", ticket.replace("run/1", "run/2"), "", "x" * 50, "\udcff" * 40, "é" * 40]
    for other in others:
        with pytest.raises(BadRecord):
            seal.read(other)
    for stranger in (Seal(KEY, OTHER), Seal(bytes(31) + b"\1", SESSION)):
        with pytest.raises(BadRecord):
            stranger.read(ticket)


def test_the_next_daemon_reads_what_was_written(tmp_path: Path) -> None:
    """The last state of each run and all of its output, over any number of daemons; ids that are gone stay known."""
    first = open_archive(tmp_path)
    first.write([news("a", RunState(), pieces(1, b"one", b"two"))], (), is_all=True)
    first.write([news("a", None, pieces(3, b"three"), 6), news("b", RunState())], (), is_all=False)
    second = open_archive(tmp_path)
    assert data_of(second.read(), "a") == b"onetwothree"
    second.write([news("a", ENDED, pieces(4, b"!"), 11), news("b", ENDED)], (), is_all=True)
    second.write([], ("b",), is_all=False)
    third = open_archive(tmp_path).read()
    assert (third.runs["a"].state, data_of(third, "a"), list(third.gone)) == (ENDED, b"onetwothree!", ["b"])
    assert (list(third.runs), third.damaged_files) == (["a"], 0)


def test_what_was_refused_is_free_again(tmp_path: Path) -> None:
    """Its id is not one of those gone, and may have been used since."""
    archive = open_archive(tmp_path)
    archive.write([news("a", RunState()), news("b", RunState())], (), is_all=True)
    archive.write([news("b", ENDED)], ("c",), refused=("a", "b"), is_all=False)
    written = open_archive(tmp_path).read()
    assert (list(written.runs), written.runs["b"].state, list(written.gone)) == (["b"], ENDED, ["c"])


def test_files_of_others_are_not_touched_at_the_start(tmp_path: Path) -> None:
    """Those of ended sessions count for nothing, and whether they go is decided elsewhere."""
    for session in (SESSION, OTHER):
        archive = RunArchive(tmp_path, session_bytes=MB, total_bytes=MB)
        archive.open({SESSION, OTHER})
        archive.session(session).write([news("a", RunState())], (), is_all=True)
    (tmp_path / "note.txt").write_text("mine")
    archive = RunArchive(tmp_path, session_bytes=MB, total_bytes=MB)
    archive.open({SESSION})
    assert archive.used_bytes == (tmp_path / f"{SESSION}.00000001.runs").stat().st_size
    assert len(list(tmp_path.iterdir())) == 3


def test_the_end_of_a_session_removes_its_files(tmp_path: Path) -> None:
    """What is still being written comes too late."""
    archive = open_archive(tmp_path)
    archive.write([news("a", RunState())], (), is_all=True)
    archive.discard()
    archive.write([news("a", ENDED)], (), is_all=False)
    assert list(tmp_path.iterdir()) == []


def test_files_that_nobody_needs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One goes when all output in it is of runs that are gone, the oldest when a session takes too much."""
    monkeypatch.setattr(run_archive, "FILE_BYTES", 1000)
    archive = open_archive(tmp_path, session_bytes=5000)
    archive.write([news("a", RunState(), pieces(1, b"x" * 1000))], (), is_all=archive.wants_all)
    assert archive.wants_all
    archive.write([news("a", ENDED), news("b", RunState())], (), is_all=True)
    assert len(list(tmp_path.iterdir())) == 2
    archive.write([], ("a",), is_all=False)
    assert len(list(tmp_path.iterdir())) == 1
    for number in range(20):
        state = RunState() if archive.wants_all else None
        output = pieces(number + 1, b"%04d" % number * 250)
        archive.write([news("b", state, output, number * 1000)], (), is_all=archive.wants_all)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8000
    kept = data_of(open_archive(tmp_path).read(), "b")
    assert 2000 < len(kept) < 8000
    assert (b"".join(b"%04d" % number * 250 for number in range(20))).endswith(kept)


def test_a_new_file_says_which_runs_there_are(tmp_path: Path) -> None:
    """One that is not named in it is gone, also when the record of that went with an older file."""
    archive = open_archive(tmp_path)
    archive.write([news("a", ENDED), news("b", ENDED, pieces(1, b"one"))], (), is_all=True)
    archive.write([news("b", ENDED)], ("a",), is_all=True)
    written = open_archive(tmp_path).read()
    assert (list(written.runs), list(written.gone), data_of(written, "b")) == (["b"], ["a"], b"one")
    (tmp_path / f"{SESSION}.00000002.runs").write_bytes(b"")
    archive = open_archive(tmp_path)
    archive.read()
    archive.write([news("b", ENDED)], (), is_all=True)
    assert list(open_archive(tmp_path).read().runs) == ["b"]


def test_a_file_that_begins_with_much_has_room_for_as_much_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many runs are not written anew with every change."""
    monkeypatch.setattr(run_archive, "FILE_BYTES", 1000)
    archive = open_archive(tmp_path)
    archive.write([news(str(number), ENDED) for number in range(50)], (), is_all=True)
    for number in range(49):
        assert not archive.wants_all
        archive.write([news(str(number), ENDED)], (), is_all=False)
    archive.write([news("49", ENDED), news("50", ENDED)], (), is_all=False)
    assert archive.wants_all


def test_used_ids_are_there_before_their_runs_are_not(tmp_path: Path) -> None:
    """A disk that takes no more has the ids or still has the runs; they go with the session."""
    archive = open_archive(tmp_path)
    archive.write([news("a", ENDED)], (), is_all=True)
    with file_size_limit(2000), pytest.raises(OSError, match="File too large"):
        archive.write([news("b", ENDED, pieces(1, b"x" * 4000))], ("a",), used=[digest_of("a")], is_all=False)
    written = open_archive(tmp_path).read()
    assert ("a" in written.used, "a" in written.runs, written.damaged_files) == (True, True, 0)
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        archive.write([], ("a",), used=[digest_of("b")], is_all=True)
    written = open_archive(tmp_path).read()
    assert ("b" in written.used, written.used.is_whole, list(written.runs)) == (False, True, ["a"])
    archive.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [True, False])
def test_a_record_that_was_never_finished_is_no_damage(tmp_path: Path, cut: bool) -> None:
    """Nobody relied on it. One that was there and has changed may have been about an id that was used."""
    archive = open_archive(tmp_path)
    archive.write([news("a", ENDED), news("b", ENDED)], (), is_all=True)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if cut:
        del content[-30:]
    else:
        content[4] ^= 1  # a length
    path.write_bytes(content)
    written = open_archive(tmp_path).read()
    assert (written.damaged_files, written.used.is_whole) == (1, cut)


def test_a_full_disk_takes_nothing_by_halves(tmp_path: Path) -> None:
    """What failed is taken back; what comes after it is read as if it had not been."""
    archive = open_archive(tmp_path)
    archive.write([news("a", RunState(), pieces(1, b"one"))], (), is_all=True)
    with file_size_limit(2000), pytest.raises(OSError, match="File too large"):
        archive.write([news("a", None, pieces(2, b"x" * 4000), 3)], (), is_all=False)
    assert archive.wants_all
    archive.write([news("a", RunState(), pieces(3, b"three"), 4003)], (), is_all=True)
    written = open_archive(tmp_path).read()
    assert (written.damaged_files, data_of(written, "a")) == (0, b"three")
    assert written.runs["a"].chunks[0].stdout_start == 4003


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_damage_costs_output_and_never_changes_it(
    texts: list[bytes], damage: list[tuple[float, int]], cut: float | None
) -> None:
    """Whatever bytes of whatever file were changed or lost: what is read is a gapless part of what was written."""
    with tempfile.TemporaryDirectory(prefix="runs") as directory:
        root, offset = Path(directory), 0
        for number, text in enumerate(texts):
            if number % 4 == 0:
                archive = open_archive(root)
            state = RunState() if archive.wants_all else None
            archive.write([news("a", state, pieces(number + 1, text), offset)], (), is_all=archive.wants_all)
            offset += len(text)
        files = sorted(root.iterdir())
        for index, (place, value) in enumerate(damage):
            path = files[index % len(files)]
            content = bytearray(path.read_bytes())
            if content:
                content[min(int(place * len(content)), len(content) - 1)] = value
            path.write_bytes(content[: None if cut is None else int(cut * len(content))])
        run = open_archive(root).read().runs.get("a")
        for chunk in run.chunks if run is not None else ():
            assert [piece.data for piece in chunk.pieces()] == texts[chunk.first_sequence - 1 : chunk.next_sequence - 1]
            assert chunk.stdout_start == sum(map(len, texts[: chunk.first_sequence - 1]))
        if run is not None and len(run.chunks) > 1:
            follows = zip(run.chunks, run.chunks[1:], strict=False)
            assert all(one.next_sequence == other.first_sequence for one, other in follows)
