"""Files that several processes read and write in a real directory at once: versions hold, whoever is first."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.files import contents
from runner.files.operations import perform
from runner.loop.context import Refused
from runner.wire.protocol import EditFiles, FilePart, FilePut, GetFile, PutFile, Unedited, Unmatched
from tests.unit.test_runner_entries import work_in

WRITERS, ROUNDS = 4, 25


def read(top: Path) -> tuple[bytes, str]:
    """Return content and version of the file `f`."""
    heads: list[object] = []
    read_fd, write_fd = os.pipe()
    perform(GetFile("f"), work_in(top, out_fd=write_fd, start=heads.append))
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        content = pipe.read()
    (head,) = heads
    assert isinstance(head, FilePart)
    return content, head.etag


def sent(top: Path, request: PutFile | EditFiles, content: bytes) -> object:
    """Perform a request with content."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, content)
    os.close(write_fd)
    try:
        return perform(request, work_in(top, source_fd=read_fd))
    finally:
        os.close(read_fd)


def put_next(top: Path) -> bool:
    """Write the number that follows the one in the file, for that version; return whether it was written."""
    content, etag = read(top)
    return isinstance(sent(top, PutFile("f", if_match=(etag,)), b"%d" % (int(content) + 1)), FilePut)


def edit_next(top: Path) -> bool:
    content, etag = read(top)
    old, new = int(content), int(content) + 1
    text = f'[{{"path": "f", "op": "replace", "old": "{old}", "new": "{new}", "if_match": {_quoted(etag)}}}]'
    try:
        return not isinstance(sent(top, EditFiles(), text.encode()), Unedited)
    except Refused as refused:
        if refused.error.code == "EXISTS":  # another process changed the file between the look and the lock
            return False
        raise


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


@pytest.mark.parametrize("kinds", [(put_next,), (edit_next,), (put_next, edit_next)])
def test_no_write_for_a_version_is_lost(tmp_path: Path, kinds: tuple[Callable[[Path], bool], ...]) -> None:
    """Processes that count up by what they read, each as often as it takes: every number is written once."""
    (tmp_path / "f").write_bytes(b"0")
    pids = []
    for number in range(WRITERS):
        pid = os.fork()
        if pid == 0:
            _count(tmp_path, kinds[number % len(kinds)])
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * WRITERS
    assert (tmp_path / "f").read_bytes() == b"%d" % (WRITERS * ROUNDS)
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def _count(top: Path, count: Callable[[Path], bool]) -> None:
    status = 1
    try:
        for _ in range(ROUNDS):
            while not count(top):
                pass
        status = 0
    finally:
        os._exit(status)


def test_of_many_that_make_a_file_one_does(tmp_path: Path) -> None:
    """With `create_only`, whoever comes first."""
    results = []
    for _ in range(WRITERS):
        read_fd, write_fd = os.pipe()
        if os.fork() == 0:
            made = sent(tmp_path, PutFile("f", create_only=True), b"x")
            os.write(write_fd, {FilePut: b"made", Unmatched: b"told"}[type(made)])
            os._exit(0)
        os.close(write_fd)
        results.append(read_fd)
    told = []
    for fd in results:
        with open(fd, "rb") as pipe:
            told.append(pipe.read())
        os.wait()
    assert sorted(told) == [b"made", *[b"told"] * (WRITERS - 1)]


def test_a_lock_of_a_command_holds_up_what_is_for_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write for a version is refused after a while, and goes on when the lock is free; another is in time."""
    monkeypatch.setattr(contents, "_LOCK_S", 0.05)
    (tmp_path / "f").write_bytes(b"0")
    with (tmp_path / "f").open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with pytest.raises(Refused) as refused:
            put_next(tmp_path)
        assert refused.value.error.code == "EXISTS"
        began = time.monotonic()
        assert isinstance(sent(tmp_path, PutFile("f"), b"7"), FilePut)
        assert time.monotonic() - began < 5
    assert put_next(tmp_path)
    assert (tmp_path / "f").read_bytes() == b"8"


def test_a_hole_of_ten_gibibytes_is_read_anywhere(tmp_path: Path) -> None:
    """The size is told, and any part comes without the rest."""
    with (tmp_path / "f").open("wb") as file:
        file.truncate(10 << 30)
        file.seek((10 << 30) - 3)
        file.write(b"end")
    heads: list[object] = []
    with (tmp_path / "out").open("w+b") as out:
        perform(GetFile("f", (10 << 30) - 10), work_in(tmp_path, out_fd=out.fileno(), start=heads.append))
        out.seek(0)
        assert out.read() == bytes(7) + b"end"
    (head,) = heads
    assert isinstance(head, FilePart)
    assert (head.size_bytes, head.count) == (10 << 30, 10)
