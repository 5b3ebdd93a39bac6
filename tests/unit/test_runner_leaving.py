"""Clients that leave while their files are changed: whatever step the work is at, it leaves nothing by halves."""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from runner.files import archive, changes
from runner.files.operations import perform
from runner.wire.protocol import CopyFile, EditFiles, FileRequest, MoveFile, RemoveFile, Unpack
from tests.unit.test_runner_entries import work_in

CONTENTS = {"from/a": b"a" * 5000, "from/d/b": b"b" * 5000, "from/d/c": b"c", "from/z": b"z"}
EDITS = [
    {"path": "from/z", "op": "delete"},
    {"path": "from/a", "op": "replace", "old": "a", "new": "A", "count": "all"},
    {"path": "from/d/new", "op": "create", "text": "new"},
]


class Gone(BaseException):
    """The client has left."""


@dataclass
class Client:
    """A client that leaves at one of the checks."""

    leaves_at: int
    checks: int = 0

    def check(self) -> None:
        self.checks += 1
        if self.checks > self.leaves_at:
            raise Gone


def contents_of(top: Path) -> dict[str, bytes]:
    return {str(each.relative_to(top)): each.read_bytes() for each in top.rglob("*") if each.is_file()}


def tar(contents: dict[str, bytes] = CONTENTS) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return out.getvalue()


def zipped(contents: dict[str, bytes] = CONTENTS) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, content in contents.items():
            made.writestr(name, content)
    return out.getvalue()


def leave_everywhere(request: FileRequest, content: bytes = b"", *, anywhere: bool = False) -> list[dict[str, bytes]]:
    """Have a client leave at each check of a request, on a new tree each time; return the files that are there then,
    last those after a client that stayed."""
    found: list[dict[str, bytes]] = []
    for step in itertools.count():
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as spool:
            top = Path(directory)
            for name, body in CONTENTS.items():
                (top / name).parent.mkdir(parents=True, exist_ok=True)
                (top / name).write_bytes(body)
            spool.write(content)
            spool.seek(0)
            work = work_in(top, anywhere=anywhere, source_fd=spool.fileno(), check=Client(step).check)
            try:
                perform(request, work)
            except Gone:
                found.append(contents_of(top))
            else:
                assert step > 3
                return [*found, contents_of(top)]
    raise AssertionError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a file be several pieces of work."""
    monkeypatch.setattr(changes, "_COPY_BYTES", 1000)
    monkeypatch.setattr(archive, "CHUNK_BYTES", 1000)


def refuse_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no file made without a name. `tempfile` would keep what it finds out, for all later tests."""
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # as an older kernel takes it: EISDIR


def test_of_a_copy_nothing_is_left() -> None:
    """Neither under its name nor beside it."""
    *left, after = leave_everywhere(CopyFile("from", "to"))
    assert left == [CONTENTS] * len(left)
    assert after == CONTENTS | {name.replace("from", "to"): body for name, body in CONTENTS.items()}


def test_a_move_between_file_systems_is_made_or_not() -> None:
    """A client that leaves before the copy has its name leaves the original alone; later the removal goes on."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        *left, after = leave_everywhere(MoveFile("from", f"{memory}/from"), anywhere=True)
        assert left == [CONTENTS] * len(left)
        assert (after, contents_of(Path(memory))) == ({}, CONTENTS)


@pytest.mark.parametrize("is_nameless", [True, False], ids=["nameless", "named"])
def test_edits_are_all_made_or_none(monkeypatch: pytest.MonkeyPatch, is_nameless: bool) -> None:
    """Also where the file system can't make a file without a name."""
    if not is_nameless:
        refuse_nameless(monkeypatch)
    *left, after = leave_everywhere(EditFiles(), json.dumps(EDITS).encode())
    assert left == [CONTENTS] * len(left)
    assert after == {
        "from/a": b"A" * 5000,
        "from/d/new": b"new",
        **{name: body for name, body in CONTENTS.items() if name.startswith("from/d/")},
    }


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_what_was_unpacked_is_whole(kind: Literal["tar", "zip"]) -> None:
    """Files that came out of the archive stay, none of them by halves, and nothing else."""
    *left, after = leave_everywhere(Unpack(100, 1 << 20, "into", kind), tar() if kind == "tar" else zipped())
    whole = CONTENTS | {f"into/{name}": body for name, body in CONTENTS.items()}
    for found in left:
        assert found.items() <= whole.items()
        assert found.items() >= CONTENTS.items()
    assert after == whole


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("is_nameless", [True, False], ids=["nameless", "named"])
def test_what_is_unpacked_over_files_leaves_each_old_or_new(
    monkeypatch: pytest.MonkeyPatch, is_nameless: bool, kind: Literal["tar", "zip"]
) -> None:
    """None is missing for a moment, and nothing is beside them."""
    if not is_nameless:
        refuse_nameless(monkeypatch)
    new = {name: body.upper() for name, body in CONTENTS.items()}
    *left, after = leave_everywhere(Unpack(100, 1 << 20, ".", kind), tar(new) if kind == "tar" else zipped(new))
    for found in left:
        assert found.keys() == CONTENTS.keys()
        assert all(body in (CONTENTS[name], new[name]) for name, body in found.items())
    assert after == new


def test_a_removal_ends_where_it_is() -> None:
    """The rest stays."""
    *left, after = leave_everywhere(RemoveFile("from", recursive=True))
    assert {len(found) for found in left} == {0, 1, 2, 3, 4}
    assert all(found.items() <= CONTENTS.items() for found in left)
    assert after == {}
