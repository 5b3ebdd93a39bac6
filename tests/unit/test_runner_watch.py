"""Changes of real directories, as a file worker tells them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.files import watch as module
from runner.files.operations import perform
from runner.loop.context import Refused
from runner.wire.protocol import ANSWERS, Done, FileChange, WatchFiles
from tests.unit.test_runner_entries import work_in
from tests.waiting import patience

PATIENCE_S = 20.0


class Watched:
    """A watch that another process performs."""

    def __init__(self, top: Path, request: WatchFiles) -> None:
        self.top = top
        read_fd, write_fd = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _perform(top, request, read_fd, write_fd)
        os.close(write_fd)
        os.set_blocking(read_fd, False)
        self._fd = read_fd
        self._rest = b""
        assert self.until(lambda lines: bool(lines)) == [("ready", "", "")]

    def until(self, is_enough: Callable[[list[tuple[str, str, str]]], bool]) -> list[tuple[str, str, str]]:
        """Return what is told until it is enough: kind and paths below the top."""
        told: list[tuple[str, str, str]] = []
        give_up_at = time.monotonic() + patience(PATIENCE_S)
        while not is_enough(told):
            assert time.monotonic() < give_up_at, told
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            if not data:
                return told
            *lines, self._rest = (self._rest + data).split(b"\n")
            told += [self._told(line) for line in lines if line]
        return told

    def _told(self, line: bytes) -> tuple[str, str, str]:
        if line == b"ready":
            return "ready", "", ""
        change = ANSWERS.decode(line)
        assert isinstance(change, FileChange)
        top = str(self.top)
        assert change.path == top or change.path.startswith(f"{top}/")
        return change.kind, change.path.removeprefix(top).lstrip("/"), change.to.removeprefix(top).lstrip("/")

    def stop(self) -> None:
        """Let the process do nothing until `go_on`."""
        os.kill(self._pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)


def _perform(top: Path, request: WatchFiles, read_fd: int, write_fd: int) -> None:
    try:
        os.close(read_fd)

        def tell(_head: object) -> None:
            os.write(write_fd, b"ready\n")

        assert isinstance(perform(request, work_in(top, out_fd=write_fd, start=tell)), Done)
    finally:
        os._exit(0)


@contextmanager
def watched(top: Path, path: str = ".", **options: Any) -> Iterator[Watched]:
    found = Watched(top, WatchFiles(path, **options))
    try:
        yield found
    finally:
        found.close()


def has(*wanted: tuple[str, ...]) -> Callable[[list[tuple[str, str, str]]], bool]:
    return lambda told: all((*each, "")[:3] in told for each in wanted)


def test_a_files_life_is_told_in_order(tmp_path: Path) -> None:
    """Made, written, closed, another mode, another name, gone; writes in a row are one."""
    with watched(tmp_path) as seen:
        with (tmp_path / "f").open("wb", buffering=0) as file:
            for _ in range(100):
                file.write(b"x")
        (tmp_path / "f").chmod(0o600)
        (tmp_path / "f").rename(tmp_path / "g")
        (tmp_path / "g").unlink()
        told = seen.until(has(("remove", "g")))
        assert told == [
            *(("create", "f", ""), ("write", "f", ""), ("close", "f", ""), ("chmod", "f", "")),
            *(("rename", "f", "g"), ("remove", "g", "")),
        ]


def test_only_entries_are_told_unless_all_below_are_wanted(tmp_path: Path) -> None:
    """A change in a directory below is none of the watched directory."""
    (tmp_path / "d").mkdir()
    with watched(tmp_path) as seen:
        (tmp_path / "d/f").touch()
        (tmp_path / "last").touch()
        assert all(not path.startswith("d/") for _, path, _ in seen.until(has(("create", "last"))))


def test_what_is_made_in_new_directories_is_told(tmp_path: Path) -> None:
    """However deep and fast, and again after the directories have other names."""
    with watched(tmp_path, recursive=True) as seen:
        (tmp_path / "a/b/c").mkdir(parents=True)
        (tmp_path / "a/b/c/f").touch()
        seen.until(has(("create", "a"), ("create", "a/b"), ("create", "a/b/c"), ("create", "a/b/c/f")))
        (tmp_path / "a").rename(tmp_path / "z")
        seen.until(has(("rename", "a", "z")))
        (tmp_path / "z/b/c/g").touch()
        told = seen.until(has(("create", "z/b/c/g")))
        assert not any(path.startswith("a") for _, path, _ in told)


def test_what_leaves_is_removed_and_not_followed(tmp_path: Path) -> None:
    """A directory that is moved elsewhere is no business of the watch any more; one that comes is."""
    top, other = tmp_path / "top", tmp_path / "other"
    (top / "d/e").mkdir(parents=True)
    other.mkdir()
    with watched(top, recursive=True) as seen:
        (top / "d").rename(other / "d")
        seen.until(has(("remove", "d")))
        (other / "d/e/f").touch()
        (other / "d").rename(top / "back")
        told = seen.until(has(("create", "back"), ("create", "back/e"), ("create", "back/e/f")))
        assert not any(path.startswith("d") for _, path, _ in told)
        (top / "back/e/g").touch()
        seen.until(has(("create", "back/e/g")))


def test_a_storm_of_removals_and_renames_is_survived(tmp_path: Path) -> None:
    """Afterwards the watch tells what happens, below directories that were made in the storm, too."""
    with watched(tmp_path, recursive=True) as seen:
        for number in range(150):
            (tmp_path / f"d{number}/e/f").mkdir(parents=True)
            (tmp_path / f"d{number}").rename(tmp_path / f"r{number}")
            if number % 2:
                shutil.rmtree(tmp_path / f"r{number}")
        (tmp_path / "end").touch()
        seen.until(has(("create", "end")))
        (tmp_path / "r0/e/f/late").touch()
        seen.until(has(("create", "r0/e/f/late")))


def test_a_lost_queue_is_told_and_recovered_from(tmp_path: Path) -> None:
    """More changes than the kernel keeps; a directory whose making was lost is watched all the same."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip("the queue of this machine is very long")
    with watched(tmp_path, recursive=True) as seen:
        seen.stop()
        for _ in range(limit // 2 + 10):
            os.mknod(f"{tmp_path}/f")
            os.unlink(f"{tmp_path}/f")
        (tmp_path / "lost").mkdir()
        seen.go_on()
        seen.until(has(("overflow", "")))
        (tmp_path / "lost/f").touch()
        seen.until(has(("create", "lost/f")))


def test_a_watch_ends_with_its_directory(tmp_path: Path) -> None:
    """The removal is told first; a silence before is told by empty lines."""
    top = tmp_path / "top"
    top.mkdir()
    with watched(top, silence_ms=20) as seen:
        time.sleep(0.2)
        top.rmdir()
        assert seen.until(lambda _told: False) == [("remove", "", "")]


def test_one_file_is_watched(tmp_path: Path) -> None:
    """Changes of the others beside are not told."""
    (tmp_path / "f").touch()
    with watched(tmp_path, "f") as seen:
        (tmp_path / "other").touch()
        (tmp_path / "f").write_bytes(b"x")
        told = seen.until(has(("close", "f")))
        assert {path for _, path, _ in told} == {"f"}


def test_too_many_directories_are_refused_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start an error; later the watch goes on without them and says so."""
    monkeypatch.setattr(module, "MAX_DIRECTORIES", 3)
    for name in "ab":
        (tmp_path / name).mkdir()
    with watched(tmp_path, recursive=True) as seen:
        (tmp_path / "c").mkdir()
        seen.until(has(("create", "c"), ("overflow", "")))
    with pytest.raises(Refused) as refused:
        perform(WatchFiles(".", recursive=True), work_in(tmp_path))
    assert refused.value.error.code == "TOO_MANY"


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link to a directory is a file of the tree."""
    other, top = tmp_path / "other", tmp_path / "top"
    other.mkdir()
    top.mkdir()
    (top / "link").symlink_to(other)
    with watched(top, recursive=True) as seen:
        (top / "second").symlink_to(other)
        (other / "f").touch()
        (top / "end").touch()
        told = seen.until(has(("create", "end")))
        assert {path for _, path, _ in told} == {"second", "end"}
