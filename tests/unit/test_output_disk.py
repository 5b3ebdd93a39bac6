"""Files of runs: what was written comes back as it was, or not at all, whatever happened to the files."""

from __future__ import annotations

import os
import random
import stat
import tempfile
import tracemalloc
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkasten.model import Cause, ExecEnd, ExecKind, Output, Stream, TerminalSize, Usage
from sandkasten.model.network import EgressDenial
from sandkasten.model.run import is_made, make_exec_id
from sandkasten.output import disk
from sandkasten.output.disk import (
    News,
    OutputDiskUse,
    OutputFile,
    RecordPlace,
    SessionFiles,
    Tail,
    Written,
    find_files,
    list_output_files,
    pack,
    remove_output_files,
    session_of,
    unpack,
)
from sandkasten.output.records import (
    BadRecord,
    RunFacts,
    RunState,
    Seal,
    Span,
    UsedIds,
    facts_from_json,
    facts_to_json,
    state_from_json,
    state_to_json,
)
from tests.stores import disk_bytes, file_size_limit

SESSION = "a" * 24
OTHER = "b" * 24
RUNS = f"{SESSION}.00000001.runs"
HOSTILE = os.fsdecode(b"no name\n\xff")
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
DENIED = (EgressDenial("a.example", 443, "not_allowed", 3), EgressDenial("b.example", None, "denied"))
END = ExecEnd("run/1", 137, 9, Cause.OOM, "/tmp/\udcff", 12, None, True, USAGE, victim="v", egress_denied=DENIED)
ENDED = RunState(MOMENT, 7, END, MOMENT, last_sequence=4, stdout_bytes=12, stderr_bytes=4)


def open_files(root: Path, session_id: str = SESSION) -> SessionFiles:
    """The files of a session, as the next daemon finds them."""
    files = SessionFiles(root, session_id, OutputDiskUse())
    find_files(root, {session_id}, lambda _: files)
    return files


def tail(exec_id: str, first: int, *texts: bytes, offset: int = 0) -> Tail:
    """Pieces of standard output; `offset` is that of the first."""
    pieces = [Output(Stream.STDOUT, text, first + number) for number, text in enumerate(texts)]
    end = offset + sum(map(len, texts))
    return Tail(exec_id, Span(first, first + len(texts), offset, end, 0, 0), pieces)


def run(exec_id: str, state: RunState | None = None) -> tuple[RunFacts, RunState]:
    return attrs.evolve(FACTS, exec_id=exec_id), state or RunState()


def write(files: SessionFiles, *tails: Tail, **news: object) -> Sequence[RecordPlace]:
    """Write some tails, which are needed from then on, and other news."""
    statement = b"" if files.needs_statement else None
    told = {"statement": statement, "number": files.take_number(), **news}
    places = files.write(News(tails=tails, **told))  # type: ignore[arg-type]
    for place in places:
        place.file.live_parts += 1
    return places


def names(root: Path, kind: str) -> list[str]:
    return sorted(path.name for path in root.glob(f"*.{kind}"))


def data_of(written: Written, exec_id: str) -> bytes:
    parts = written.runs[exec_id].parts
    return b"".join(piece.data for span, place in parts for piece in unpack(place.read(), span.first_sequence))


def digests(*exec_ids: str) -> bytes:
    used = UsedIds()
    for exec_id in exec_ids:
        used.add(exec_id)
    return used.encode()


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


@given(st.lists(st.tuples(st.sampled_from(Stream), st.binary(max_size=300)), max_size=8), st.integers(0, 8))
def test_packed_pieces_come_back(content: list[tuple[Stream, bytes]], place: int) -> None:
    """All bytes, streams and sizes; two parts packed alone are the same bytes."""
    pieces = [Output(stream, data, number) for number, (stream, data) in enumerate(content, 5)]
    assert unpack(pack(pieces), 5) == pieces
    assert pack(pieces[:place]) + pack(pieces[place:]) == pack(pieces)


@pytest.mark.parametrize("data", [b"\x07abcde", b"\0\xff\xff\xff\xffab", b"\0\1\0\0\0a\0", b"\0"])
def test_what_is_no_piece_is_refused(data: bytes) -> None:
    """An unknown stream, a piece without end, a header that is cut short."""
    with pytest.raises(BadRecord):
        unpack(data, 1)


def test_the_next_daemon_reads_what_was_written(tmp_path: Path) -> None:
    """The last state of each run and all of its output, over any number of daemons; ids that are gone stay known."""
    first = open_files(tmp_path)
    write(first, tail("a", 1, b"one", b"two"), runs=[run("a")])
    write(first, tail("a", 3, b"three", offset=6), runs=[run("b")])
    second = open_files(tmp_path)
    assert data_of(second.read(), "a") == b"onetwothree"
    write(second, tail("a", 4, b"!", offset=11), runs=[run("a", ENDED), run("b", ENDED)])
    write(second, gone=["b"])
    third = open_files(tmp_path).read()
    assert (third.runs["a"].state, data_of(third, "a"), list(third.gone)) == (ENDED, b"onetwothree!", ["b"])
    assert (list(third.runs), third.damaged_files, "b" in third.used, "a" in third.used) == (["a"], 0, True, False)


def test_output_that_was_written_twice_is_read_once(tmp_path: Path) -> None:
    """A write whose caller left it alone may have reached the disk."""
    files = open_files(tmp_path)
    write(files, tail("a", 1, b"one"), tail("a", 2, b"two", offset=3), runs=[run("a")])
    write(files, tail("a", 1, b"one"), tail("a", 2, b"two", b"three", offset=3))
    written = open_files(tmp_path).read()
    assert data_of(written, "a") == b"onetwothree"
    assert written.damaged_files == 0


def test_what_lies_before_a_gap_is_gone(tmp_path: Path) -> None:
    """Output has no hole that nobody is told of."""
    files = open_files(tmp_path)
    write(files, tail("a", 1, b"one"), tail("a", 3, b"three", offset=6), runs=[run("a")])
    written = open_files(tmp_path).read()
    assert data_of(written, "a") == b"three"
    assert written.runs["a"].parts[0][0].stdout_start == 6


def test_what_was_refused_is_free_again(tmp_path: Path) -> None:
    """The id is not one of those gone, and may have been used since."""
    files = open_files(tmp_path)
    write(files, runs=[run("a"), run("b")])
    write(files, runs=[run("b", ENDED)], gone=["c"], refused=["a", "b"])
    written = open_files(tmp_path).read()
    assert (list(written.runs), written.runs["b"].state, list(written.gone)) == (["b"], ENDED, ["c"])


def test_files_are_private_and_no_link_is_followed(tmp_path: Path) -> None:
    """Output may hold secrets; a name that is taken is not written through."""
    root = tmp_path / "spool"
    files = open_files(root)
    write(files, runs=[run("a")])
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / RUNS).stat().st_mode) == 0o600
    target = tmp_path / "target"
    (root / f"{OTHER}.00000001.runs").symlink_to(target)
    with pytest.raises(FileExistsError):
        write(SessionFiles(root, OTHER, OutputDiskUse()), runs=[run("a")])
    assert not target.exists()
    written = open_files(root, OTHER).read()
    assert (written.damaged_files, written.used.is_whole) == (1, False)


def test_files_of_others_are_not_touched_at_the_start(tmp_path: Path) -> None:
    """Files of ended sessions count for nothing; `reconcile.py` decides about them."""
    for session_id in (SESSION, OTHER):
        write(SessionFiles(tmp_path, session_id, OutputDiskUse()), runs=[run("a")])
    (tmp_path / "note.txt").write_text("mine")
    (tmp_path / f"{SESSION}.00000007.runs").mkdir()
    os.mkfifo(tmp_path / f"{SESSION}.00000008.runs")
    use = OutputDiskUse()
    files = SessionFiles(tmp_path, SESSION, use)
    find_files(tmp_path, {SESSION}, lambda _: files)
    written = files.read()
    assert (list(written.runs), written.damaged_files, written.used.is_whole) == (["a"], 1, False)
    assert use.record_bytes == sum(path.stat().st_size for path in tmp_path.glob(f"{SESSION}*"))
    assert len(list(tmp_path.iterdir())) == 5


def test_the_end_of_a_session_removes_its_files(tmp_path: Path) -> None:
    """A write under way comes too late; a file that a reader needs stays as long."""
    files = open_files(tmp_path)
    (place,) = write(files, tail("a", 1, b"one"), runs=[run("a")])
    files.discard()
    write(files, tail("a", 2, b"two", offset=3))
    assert place.read() == pack(tail("a", 1, b"one").content)  # type: ignore[arg-type]
    place.file.live_parts -= 1
    files.remove_unneeded()
    assert (list(tmp_path.iterdir()), files.is_empty) == ([], True)


def test_a_file_of_output_stays_while_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is being filled stays, too, and no file goes before the next daemon has counted what is needed."""
    monkeypatch.setattr(disk, "FILE_BYTES", 1000)
    files = open_files(tmp_path)
    (first,) = write(files, tail("a", 1, b"x" * 4000), runs=[run("a")])
    (second,) = write(files, tail("a", 2, b"y", offset=4000))
    assert names(tmp_path, "out") == [first.file.path.name, second.file.path.name]
    first.file.live_parts = second.file.live_parts = 0
    files.keep()
    files.remove_unneeded()
    assert len(names(tmp_path, "out")) == 2
    files.read()
    files.remove_unneeded()
    assert len(names(tmp_path, "out")) == 2
    files.note_counted()
    (third,) = write(files, tail("a", 3, b"z", offset=4001), runs=[run("a")])
    files.remove_unneeded()
    third.file.live_parts = 0
    files.remove_unneeded()
    assert names(tmp_path, "out") == [third.file.path.name]
    third.file.live_parts = 1
    files.give_up(third.file)
    assert names(tmp_path, "out") == []
    (fourth,) = write(files, tail("a", 4, b"z", offset=4002))
    assert names(tmp_path, "out") == [fourth.file.path.name] != [third.file.path.name]


def test_older_records_go_once_the_statement_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The amount of output makes no difference."""
    monkeypatch.setattr(disk, "FILE_BYTES", 1000)
    files = open_files(tmp_path)
    write(files, tail("a", 1, b"x" * 4000), runs=[run("a", ENDED)])
    while not files.needs_statement:
        write(files, runs=[run("a", ENDED)])
    files.remove_unneeded()
    (older,) = names(tmp_path, "runs")
    write(files, runs=[run("a", ENDED), run("b", ENDED)])
    assert len(names(tmp_path, "runs")) == 2
    files.remove_unneeded()
    assert (len(names(tmp_path, "runs")), older in names(tmp_path, "runs")) == (1, False)
    written = open_files(tmp_path).read()
    assert (list(written.runs), data_of(written, "a")) == (["a", "b"], b"x" * 4000)
    (tmp_path / f"{SESSION}.000000ff.runs").write_bytes(b"the statement of a daemon that was killed"[:9])
    after = open_files(tmp_path)
    assert list(after.read().runs) == ["a", "b"]
    after.note_counted()
    after.remove_unneeded()
    assert list(open_files(tmp_path).read().runs) == ["a", "b"]


def test_a_write_that_was_overtaken_changes_nothing(tmp_path: Path) -> None:
    """Older states come behind neither newer ones nor `read`, though the thread of a cancelled write goes on."""
    files = open_files(tmp_path)
    early, late = files.take_number(), files.take_number()
    write(files, runs=[run("a", ENDED)], number=late)
    with pytest.raises(OSError, match="a later write came first"):
        write(files, runs=[run("a"), run("b")], number=early)
    left_alone = files.take_number()
    assert list(files.read().runs) == ["a"]
    with pytest.raises(OSError, match="a later write came first"):
        write(files, runs=[run("b")], number=left_alone)
    write(files, runs=[run("a", ENDED), run("c")], number=files.take_number())
    written = open_files(tmp_path).read()
    assert (list(written.runs), written.runs["a"].state) == (["a", "c"], ENDED)


def test_a_statement_says_which_runs_there_are(tmp_path: Path) -> None:
    """A run that is not named in it is gone, also when the record of that went with an older file."""
    write(open_files(tmp_path), tail("b", 1, b"one"), runs=[run("a", ENDED), run("b", ENDED)])
    write(open_files(tmp_path), runs=[run("b", ENDED)])
    written = open_files(tmp_path).read()
    assert (list(written.runs), list(written.gone), data_of(written, "b")) == (["b"], ["a"], b"one")
    assert "a" in written.used


def test_a_file_that_begins_with_much_has_room_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many runs are not written anew with every change."""
    monkeypatch.setattr(disk, "FILE_BYTES", 1000)
    files = open_files(tmp_path)
    write(files, runs=[run(str(number), ENDED) for number in range(50)])
    for number in range(49):
        assert not files.needs_statement
        write(files, runs=[run(str(number), ENDED)])
    while not files.needs_statement:
        write(files, runs=[run("0", ENDED)])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_takes_nothing_by_halves(tmp_path: Path) -> None:
    """A failed write is taken back; the next one is read as if there had been none."""
    files = open_files(tmp_path)
    write(files, tail("a", 1, b"one"), runs=[run("a")])
    before_bytes = disk_bytes(tmp_path)
    with file_size_limit(2000):
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                write(files, tail("a", 2, b"x" * 4000, offset=3), runs=[run("a")])
            assert files.needs_statement
    assert (len(list(tmp_path.iterdir())), disk_bytes(tmp_path)) == (2, before_bytes)
    with pytest.raises(OSError, match="failed meanwhile"):
        write(files, statement=None)
    write(files, tail("a", 3, b"three", offset=4003), runs=[run("a")], statement=digests("used"))
    written = open_files(tmp_path).read()
    assert (written.damaged_files, data_of(written, "a"), "used" in written.used) == (0, b"three", True)


@pytest.mark.parametrize("cut", [True, False])
def test_a_record_that_was_never_finished_is_no_damage(tmp_path: Path, cut: bool) -> None:
    """Nobody relied on it, and nobody is warned. A record that has changed may have been about an id that was used."""
    write(open_files(tmp_path), runs=[run("a", ENDED), run("b", ENDED)])
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if cut:
        del content[-30:]
    else:
        content[4] ^= 1  # a length
    path.write_bytes(content)
    written = open_files(tmp_path).read()
    assert (written.damaged_files, written.used.is_whole) == (int(not cut), cut)


def test_damaged_output_says_nothing_about_used_ids(tmp_path: Path) -> None:
    """The damage is told, and the session takes new ids as before."""
    write(open_files(tmp_path), tail("a", 1, b"one"), runs=[run("a")])
    (name,) = names(tmp_path, "out")
    (tmp_path / name).write_bytes(b"x" * 100)
    written = open_files(tmp_path).read()
    assert (list(written.runs), written.runs["a"].parts, written.damaged_files) == (["a"], [], 1)
    assert written.used.is_whole


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1), bit=st.integers(0, 7))
def test_no_used_id_is_lost_untold(place: float, bit: int) -> None:
    """Wherever a bit has changed: all ids are known, or not all are said to be."""
    with tempfile.TemporaryDirectory(prefix="runs") as directory:
        root = Path(directory)
        files = open_files(root)
        write(files, runs=[run("c")], statement=digests("a", "b"))
        write(files, gone=["c"])
        (path,) = root.iterdir()
        content = bytearray(path.read_bytes())
        content[min(int(place * len(content)), len(content) - 1)] ^= 1 << bit
        path.write_bytes(content)
        used = open_files(root).read().used
        assert not used.is_whole


def test_ids_that_were_lost_stay_lost(tmp_path: Path) -> None:
    """The damaged file goes, and each later statement says that ids are missing; also one without any id."""
    files = open_files(tmp_path)
    write(files, gone=["a"], statement=digests())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    for added in ("", "b", "c"):
        files = open_files(tmp_path)
        used = files.read().used
        assert not used.is_whole
        if added:
            used.add(added)
        write(files, statement=used.encode())
        files.remove_unneeded()
        assert not path.exists()
    used = open_files(tmp_path).read().used
    assert ("b" in used, "c" in used, used.is_whole) == (True, True, False)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_damage_costs_output_and_never_changes_it(
    texts: list[bytes], damage: list[tuple[float, int]], cut: float | None
) -> None:
    """Any bytes of any file changed or lost: a reader gets a gapless part of the output, unchanged."""
    with tempfile.TemporaryDirectory(prefix="runs") as directory:
        root, offset = Path(directory), 0
        for number, text in enumerate(texts):
            if number % 4 == 0:
                files = open_files(root)
            write(files, tail("a", number + 1, text, offset=offset), runs=[run("a")] if files.needs_statement else [])
            offset += len(text)
        paths = sorted(root.iterdir())
        for index, (place, value) in enumerate(damage):
            path = paths[index % len(paths)]
            content = bytearray(path.read_bytes())
            if content:
                content[min(int(place * len(content)), len(content) - 1)] = value
            path.write_bytes(content[: None if cut is None else int(cut * len(content))])
        found = open_files(root).read().runs.get("a")
        parts = found.parts if found is not None else []
        for span, where in parts:
            assert span.stdout_start == sum(map(len, texts[: span.first_sequence - 1]))
            try:
                read = unpack(where.read(), span.first_sequence)
            except BadRecord:
                continue
            assert [piece.data for piece in read] == texts[span.first_sequence - 1 : span.next_sequence - 1]
        assert all(one.precedes(other) for (one, _), (other, _) in pairwise(parts))


# Used ids -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=6)))
def test_the_set_holds_what_was_put_in_and_nothing_else(exec_ids: list[str]) -> None:
    """As a set of Python's does; merged with itself it is the same."""
    used, oracle = UsedIds(), set[str]()
    for exec_id in exec_ids:
        used.add(exec_id)
        oracle.add(exec_id)
        assert len(used) == len(oracle)
    again = UsedIds()
    again.add("other than these")
    for _ in range(2):
        again.merge(used.encode())
    assert len(again) == len(oracle) + 1
    assert all(exec_id in used and exec_id in again for exec_id in oracle)
    assert not any(f"{exec_id} " in used for exec_id in oracle)


@pytest.mark.slow
def test_very_many_take_few_bytes_each() -> None:
    """Two hundred thousand digests take less than 12 bytes each."""
    encoded = random.Random(1).randbytes(8 * 200_000)
    tracemalloc.start()
    try:
        used = UsedIds()
        used.merge(encoded)
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(used) == 200_000
    assert size_bytes < 12 * len(used)


def test_a_client_can_tell_an_id_that_the_server_made() -> None:
    """Each is new, and no other text has the form."""
    made = {make_exec_id() for _ in range(100)}
    assert len(made) == 100
    assert all(is_made(each) for each in made)
    others = ["", "run-", "a" * 16, "run-" + "a" * 15, "run-" + "a" * 17, "run-" + "A" * 16, "run-" + "a" * 16 + "\n"]
    assert not any(is_made(each) for each in others)


# The directory ------------------------------------------------------------------------------------------------------


def test_files_say_whose_they_are(tmp_path: Path) -> None:
    """Files with runs are a session's; a name of any bytes can be told."""
    for name in (RUNS, "0000000000000001.spool", HOSTILE):
        (tmp_path / name).touch()
    expected = {OutputFile(RUNS, SESSION), OutputFile("0000000000000001.spool"), OutputFile("no name\n\\xff")}
    assert set(list_output_files(tmp_path)) == expected
    assert list_output_files(tmp_path / "nowhere") == ()


def test_a_name_that_only_looks_like_a_session_s_is_nobody_s() -> None:
    """An id has hexadecimal digits and no others, and nothing follows the ending."""
    for name in (
        "a.00000001.runs",
        f"{SESSION}.1.runs",
        f"{RUNS}.new",
        f"x{RUNS}",
        f"{RUNS}\n",
        f"{SESSION}.ids",
        f"{SESSION}.00000001.out2",
    ):
        assert session_of(name) is None


def test_only_what_was_told_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    """A path as a name removes nothing; what can't be removed is said."""
    outside, store = tmp_path / "outside", tmp_path / "spool"
    outside.write_text("kept")
    store.mkdir()
    (store / "link").symlink_to(outside)
    (store / "directory").mkdir()
    (store / HOSTILE).touch()
    (store / RUNS).touch()
    named = {"link", "directory", "no name\n\\xff", "../outside", str(outside), "gone"}
    assert set(remove_output_files(store, named)) == {"directory"}
    assert sorted(os.listdir(store)) == sorted([RUNS, "directory"])
    assert outside.read_text() == "kept"
