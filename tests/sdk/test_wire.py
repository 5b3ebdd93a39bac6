"""The format without I/O: events, frames, text and archives, whole and hostile."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from sandkasten import errors
from sandkasten.sdk.archives import pack, unpack
from sandkasten.sdk.channels import GRANT_BYTES, OutputPlace, RunChannel
from sandkasten.sdk.types import ExecResult, RunEnd
from sandkasten.sdk.wire import (
    MAX_EVENT_BYTES,
    Decoder,
    EventDecoder,
    Frame,
    call,
    part,
    read_frame,
    read_message,
)

EVENTS = b': ping\n\nid: 1\nevent: chunk\ndata: {"chunk":"a"}\n\nid: 2\r\n\r\nevent: done\ndata: {\ndata: }\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    """Comments are left out, an id alone counts, lines of data are joined, and a carriage return is no text."""
    decoder = EventDecoder()
    found = [event for start in range(0, len(EVENTS), size) for event in decoder.feed(EVENTS[start : start + size])]
    assert [(each.name, each.data, each.id) for each in found] == [
        ("chunk", '{"chunk":"a"}', "1"),
        ("", "", "2"),
        ("done", "{\n}", ""),
    ]
    for line in (b"x" * (MAX_EVENT_BYTES + 1), b"data: x\n" * (MAX_EVENT_BYTES + 1)):
        with pytest.raises(errors.ConnectionFailed, match="too long"):
            list(EventDecoder().feed(line))


def test_what_is_none_of_the_protocol_is_a_lost_connection() -> None:
    """Frames and messages of any shape."""
    for frame in (b"", b"short", bytes(13), b"\0\0\0\1\x09" + bytes(8)):
        with pytest.raises(errors.ConnectionFailed):
            read_frame(frame)
    for message in ("", "[]", "1", "{}", '{"type": 1}', "{"):
        with pytest.raises(errors.ConnectionFailed):
            read_message(message)
    found = read_frame(b"\0\0\0\7\x82" + (5).to_bytes(8, "big") + b"data")
    assert (found.channel, found.stream, found.seq, found.more, bytes(found.data)) == (7, "stderr", 5, True, b"data")


def frame_of(seq: int, data: bytes, *, more: bool = False) -> Frame:
    return Frame(1, "stdout", seq, more, memoryview(data))


def test_a_channel_takes_each_byte_once() -> None:
    """Behind two whole pieces and three bytes of the next one, which come again in other parts."""
    channel = RunChannel(1, OutputPlace(2, 3))
    for frame in (
        *(frame_of(2, b"old"), frame_of(3, b"ab", more=True), frame_of(3, b"cdef", more=True), frame_of(3, b"gh")),
        frame_of(4, b"next"),
    ):
        channel.add(frame)
    assert [(piece.data, place) for piece, place in channel.pieces] == [
        (b"def", OutputPlace(2, 6)),
        (b"gh", OutputPlace(3)),
        (b"next", OutputPlace(4)),
    ]
    assert not RunChannel(1, OutputPlace(9)).has_news()
    again = RunChannel(1, OutputPlace(9))
    again.add(frame_of(9, bytes(GRANT_BYTES)))  # what comes twice takes credit as well, which is to be given back
    assert (again.has_news(), list(again.pieces)) == (True, [])


def test_text_never_ends_in_half_a_character() -> None:
    """A character that is never completed comes at the end, as U+FFFD; bytes stay as they are."""
    decoder = Decoder()
    pieces = [decoder.feed("stdout", bytes([byte]), 1) for byte in "ü€".encode()]
    assert [piece.data for piece in pieces if piece] == ["ü", "€"]
    assert decoder.feed("stderr", b"\xc3", 2) is None
    assert [(each.stream, each.data) for each in decoder.rest()] == [("stderr", "\ufffd")]
    raw = Decoder(raw=True)
    assert [piece and piece.data for piece in (raw.feed("stdout", b"\xc3", 1),)] == [b"\xc3"]


def test_queries_are_spelled_as_the_server_reads_them() -> None:
    """Names that are not UTF-8 have NUL bytes, for surrogates if they are local ones; what is not given is left out."""
    request = call("GET", "/p", query={"path": "a b\0ff&c", "none": None, "yes": True, "number": 3})
    assert request.target == "/p?path=a%20b%00ff%26c&yes=true&number=3"
    assert call("GET", part("\udcff"), query={"path": "a b\udcff&c"}).target == "%00ff?path=a%20b%00ff%26c"


def test_a_result_says_whether_it_succeeded() -> None:
    """The message of a failure has head and tail of the output."""
    assert ExecResult(0, "/", "", False, 1).check().ok
    with pytest.raises(errors.CommandFailed, match="exit code 2") as failed:
        ExecResult(2, "/", "a" * 5000 + "end", False, 1).check()
    assert "3003 characters left out" in str(failed.value)
    assert str(failed.value).endswith("end")
    with pytest.raises(errors.CommandFailed, match="oom, exit code 137"):
        RunEnd(137, "/", 1, cause="oom").check()


def test_an_error_of_the_server_can_be_sent_to_another_process() -> None:
    """With its class, which is made at run time."""
    body = '{"error_code": "SHELL_BUSY", "message": "busy", "details": {"queue_length": 3}, "retryable": true}'
    error = errors.api_error(body, 409, retry_after_s=2, streamed=True)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert isinstance(again, errors.ShellBusy | errors.SandkastenStreamError)


# Archives -------------------------------------------------------------------------------------------------------------


def archive_of(*members: tuple[str, bytes, str], mode: int = 0o4755) -> io.BytesIO:
    """Return an archive of members: name, type, and the target of a link or the content."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            if kind == tarfile.REGTYPE:
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
            else:
                info.linkname = text
                tar.addfile(info)
    made.seek(0)
    return made


FILE, LINK, HARD, FIFO, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    ("members", "left"),
    [
        ([("../out", FILE, "x")], 1),
        ([("/out", FILE, "x")], 1),
        ([("a/../../out", FILE, "x")], 1),
        ([("a", LINK, "../out")], 1),
        ([("a", LINK, "/etc/passwd")], 1),
        ([("d/a", LINK, "b/../../../out")], 1),
        ([("a", LINK, ".."), ("a/out", FILE, "x")], 1),
        ([("here", LINK, "d"), ("here/out", FILE, "x")], 0),
        ([("a", HARD, "../secret")], 1),
        ([("a", HARD, "l/secret")], 1),
        ([("a", HARD, "OUTSIDE/secret")], 1),
        ([("/OUTSIDE/out", FILE, "x")], 1),
        ([("a", FIFO, "")], 1),
        ([("d1/d2", FOLDER, ""), ("d1/d2/l", LINK, "../.."), ("s", LINK, "d1/d2/l/..")], 1),
        ([("s", LINK, "d1/d2/l/.."), ("d1/d2", FOLDER, ""), ("d1/d2/l", LINK, "../..")], 1),
        ([("s", LINK, "l"), ("t", LINK, "l/secret")], 2),
        ([("o", LINK, "o"), ("s", LINK, "o"), ("d/s", LINK, "../o/x"), ("x.1", FILE, "x"), ("x", LINK, "x.1")], 0),
    ],
)
def test_an_archive_of_a_sandbox_leads_nowhere(
    members: list[tuple[str, bytes, str]], left: int, tmp_path: Path
) -> None:
    """Nothing is written, read or linked outside of the directory, and set-id bits are dropped."""
    (tmp_path / "secret").write_text("secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "l").symlink_to(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    outside = str(tmp_path)
    members = [
        (name.replace("OUTSIDE", outside), kind, text.replace("OUTSIDE", outside)) for name, kind, text in members
    ]
    found = unpack(archive_of(*members), root)
    assert found.skipped == left
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert path.read_text() == "x"
            assert path.stat().st_mode & 0o7777 == 0o755
        assert path == root / "l" or Path(os.path.realpath(path)).is_relative_to(root)


def test_a_directory_may_be_named_by_a_link_of_the_user(tmp_path: Path) -> None:
    """Hard links of the archive are made all the same; a link below it is replaced, as any file in the way is."""
    (tmp_path / "there").mkdir()
    (tmp_path / "root").symlink_to("there")
    (tmp_path / "there/l").symlink_to(tmp_path)
    (tmp_path / "there/p").write_text("plain")
    found = unpack(
        archive_of(("a", FILE, "x"), ("d/b", HARD, "a"), ("l/f", FILE, "x"), ("p/f", FILE, "x")), tmp_path / "root"
    )
    assert (found.entries, found.skipped) == (4, 0)
    assert (tmp_path / "there/a").samefile(tmp_path / "there/d/b")
    assert not (tmp_path / "there/l").is_symlink()
    assert (tmp_path / "there/p").is_dir()
    assert not (tmp_path / "f").exists()


def test_a_damaged_archive_is_said(tmp_path: Path) -> None:
    """As a lost connection, since it was cut on its way."""
    whole = archive_of(("a", FILE, "x" * 5000)).getvalue()
    with pytest.raises(errors.ConnectionFailed, match="damaged"):
        unpack(io.BytesIO(whole[:2000]), tmp_path)
    with pytest.raises(errors.ConnectionFailed, match="damaged"):
        unpack(io.BytesIO(b"x" * 5000), tmp_path)


@pytest.mark.parametrize(
    ("headers", "is_damage"),
    [
        ({"path": "a\0b"}, True),
        ({"mtime": "nan"}, True),
        ({"mtime": "1e300"}, True),
        ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}, True),
        ({"GNU.sparse.map": "0,0,99999999,0", "GNU.sparse.size": "99999999"}, False),
    ],
)
def test_what_an_archive_says_of_a_member_is_not_believed(
    headers: dict[str, str], is_damage: bool, tmp_path: Path
) -> None:
    """A name or time that no file can have is damage; a file of holes is left out, whatever its size."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a")
        info.pax_headers, info.size = headers, 1
        tar.addfile(info, io.BytesIO(b"x"))
    made.seek(0)
    with pytest.raises(errors.ConnectionFailed, match="damaged") if is_damage else nullcontext():
        assert unpack(made, tmp_path).skipped == 1
        assert list(tmp_path.iterdir()) == []


def test_a_directory_comes_back_as_it_was(tmp_path: Path) -> None:
    """Names of any length and bytes, links, empty directories, modes and times; what is no file is left out."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / ("n" * 200) / "deep").mkdir(parents=True)
    (source / "empty").mkdir(mode=0o700)
    (source / "ü").write_bytes(bytes(1000))
    (source / "bad\udcff").write_text("x")
    (source / "run").write_text("#!")
    (source / "run").chmod(0o755)
    os.utime(source / "run", (1, 1_000_000))
    (source / "link").symlink_to("run")
    os.mkfifo(source / "fifo")
    found = unpack(io.BytesIO(b"".join(pack(source))), target)
    assert found.skipped == 0

    def describe(root: Path) -> dict[str, tuple[object, ...]]:
        about: Callable[[Path], tuple[object, ...]] = lambda path: (  # noqa: E731
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None,
        )
        return {str(path.relative_to(root)): about(path) for path in root.rglob("*") if path.name != "fifo"}

    assert describe(target) == describe(source)
    assert (target / "run").stat().st_mtime == 1_000_000
