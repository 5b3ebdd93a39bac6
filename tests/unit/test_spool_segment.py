"""The spool's files: what is written comes back, what is damaged is refused, what fails leaves nothing."""

from __future__ import annotations

import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkasten.model import Output, Stream
from sandkasten.output.spool_segment import (
    Segment,
    SegmentDamaged,
    clear_directory,
    prepare_directory,
    read_block,
    remove_segments,
    segment_path,
    write_segment,
)

Block = list[Output]


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `size_bytes` (setrlimit(2), RLIMIT_FSIZE): writes fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def numbered(contents: list[list[tuple[Stream, bytes]]]) -> list[Block]:
    blocks: list[Block] = []
    sequence = 0
    for content in contents:
        blocks.append([])
        for stream, data in content:
            sequence += 1
            blocks[-1].append(Output(stream, data, sequence))
    return blocks


contents = st.lists(
    st.lists(st.tuples(st.sampled_from(Stream), st.binary(max_size=300)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@given(contents)
def test_blocks_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, content: list[list[tuple[Stream, bytes]]]
) -> None:
    """Whatever bytes, streams and sizes: every block of a file is read alone, by its place."""
    blocks = numbered(content)
    path = segment_path(tmp_path_factory.mktemp("spool"), 1)
    position = 0
    for block, length in zip(blocks, write_segment(path, blocks), strict=True):
        assert block == read_block(path, position, length, block[0].sequence)
        position += length
    assert path.stat().st_size == position


def test_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    """Output may hold secrets; a name is used once, and not through a link that someone else put there."""
    prepare_directory(tmp_path / "spool")
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700
    path = segment_path(tmp_path / "spool", 1)
    write_segment(path, [[Output(Stream.STDOUT, b"first", 1)]])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_segment(path, [[Output(Stream.STDOUT, b"second", 1)]])
    target = tmp_path / "elsewhere"
    link = segment_path(tmp_path / "spool", 2)
    link.symlink_to(target)
    with pytest.raises(OSError):
        write_segment(link, [[Output(Stream.STDOUT, b"x", 1)]])
    assert not target.exists()


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    """Half a segment would take up the room that was missing."""
    path = segment_path(tmp_path, 1)
    with file_size_limit(100_000), pytest.raises(OSError):
        write_segment(path, [[Output(Stream.STDOUT, b"x" * 60_000, 1)], [Output(Stream.STDOUT, b"y" * 60_000, 2)]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"\x07" + data[1:],
        lambda data: data[:1] + b"\xff\xff\xff\xff" + data[5:],
        lambda data: data[:1] + b"\x07\x00\x00\x00" + data[5:],
    ],
    ids=["short", "empty", "unknown stream", "endless record", "cut header"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A file that is not what was written gives no output at all."""
    path = segment_path(tmp_path, 1)
    (length,) = write_segment(path, [[Output(Stream.STDOUT, b"abc", 1), Output(Stream.STDERR, b"d", 2)]])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SegmentDamaged):
        read_block(path, 0, length, 1)


def test_only_the_spools_own_files_are_removed(tmp_path: Path) -> None:
    """A directory that was named by mistake keeps what is not ours."""
    write_segment(segment_path(tmp_path, 1), [[Output(Stream.STDOUT, b"x", 1)]])
    other = tmp_path / "notes.txt"
    other.write_text("keep")
    prepare_directory(tmp_path)
    assert [other] == list(tmp_path.iterdir())
    clear_directory(tmp_path)
    assert [other] == list(tmp_path.iterdir())


def test_removing_tells_how_much_it_freed(tmp_path: Path) -> None:
    """A file that is gone already counts as freed, one that can't be removed does not."""
    path = segment_path(tmp_path, 1)
    (length,) = write_segment(path, [[Output(Stream.STDOUT, b"x" * 100, 1)]])
    stuck = tmp_path / "stuck"
    (stuck / "inside").mkdir(parents=True)
    segments = [Segment(path, length, 0), Segment(segment_path(tmp_path, 2), 7, 0), Segment(stuck, 1000, 0)]
    assert length + 7 == remove_segments(segments)
    assert [stuck] == list(tmp_path.iterdir())
