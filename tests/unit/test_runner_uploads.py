"""Part files of uploads in a real directory: of one request at a time, never another file, and gone at the end."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from runner.files.operations import perform
from runner.loop.context import Refused
from runner.wire.protocol import (
    AppendUpload,
    BeginUpload,
    CommitUpload,
    DropUpload,
    FilePut,
    FileRequest,
    LookUpload,
    UploadState,
)
from tests.unit.test_runner_entries import work_in

ID = "0123456789abcdef" * 2
PART = f".sandkasten-{ID}.part"


def append(top: Path, offset: int, content: bytes, *, max_bytes: int = 100) -> object:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, content)
    os.close(write_fd)
    try:
        request = AppendUpload("f", ID, offset, max_bytes)
        return perform(request, work_in(top, source_fd=read_fd))
    finally:
        os.close(read_fd)


def refused(top: Path, request: FileRequest) -> str:
    with pytest.raises(Refused) as raised:
        perform(request, work_in(top))
    return raised.value.error.code


def test_bytes_are_appended_where_they_belong(tmp_path: Path) -> None:
    """Up to the announced size, and nothing of a piece for another offset."""
    path = str(tmp_path / "f")
    assert perform(BeginUpload("f", ID), work_in(tmp_path)) == UploadState(path, 0)
    assert append(tmp_path, 0, b"ab") == UploadState(path, 2)
    assert append(tmp_path, 1, b"x") == UploadState(path, 2, "offset")
    assert append(tmp_path, 2, b"cdef", max_bytes=4) == UploadState(path, 4, "too_much")
    assert perform(LookUpload("f", ID), work_in(tmp_path)) == UploadState(path, 4)
    assert (tmp_path / PART).read_bytes() == b"abcd"
    assert isinstance(perform(CommitUpload("f", ID, 4), work_in(tmp_path)), FilePut)
    assert [each.name for each in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"abcd"


def test_a_file_that_could_not_be_replaced_has_no_upload(tmp_path: Path) -> None:
    """A directory, an id that is none, and an id that is taken."""
    (tmp_path / "d").mkdir()
    assert refused(tmp_path, BeginUpload("d", ID)) == "IS_DIRECTORY"
    assert refused(tmp_path, BeginUpload("f", "../" + ID)) == "BAD_REQUEST"
    perform(BeginUpload("f", ID), work_in(tmp_path))
    assert refused(tmp_path, BeginUpload("f", ID)) == "EXISTS"


def test_what_a_command_puts_in_place_of_the_part_is_left_alone(tmp_path: Path) -> None:
    """A link, a further name of another file, a directory: nothing is written through them or published."""
    (tmp_path / "secret").write_text("kept")
    for make in (os.symlink, os.link):
        make(tmp_path / "secret", tmp_path / PART)
        with pytest.raises(Refused):
            append(tmp_path, 4, b"x")
        refused(tmp_path, CommitUpload("f", ID))
        (tmp_path / PART).unlink()
    assert refused(tmp_path, LookUpload("gone/f", ID)) == "FILE_NOT_FOUND"
    assert not (tmp_path / "gone").exists()
    assert (tmp_path / "secret").read_text() == "kept"


def test_one_request_at_a_time(tmp_path: Path) -> None:
    """A second one is refused while the first has the part file, and a drop may be repeated."""
    perform(BeginUpload("f", ID), work_in(tmp_path))
    with (tmp_path / PART).open("rb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        assert refused(tmp_path, CommitUpload("f", ID)) == "EXISTS"
    for _ in range(2):
        perform(DropUpload("f", ID), work_in(tmp_path))
    assert list(tmp_path.iterdir()) == []
