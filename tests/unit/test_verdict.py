"""The verdict of a process that has read a hostile archive, as nsinit takes it."""

from __future__ import annotations

import errno
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsinit.tools.unpack import NameList
from nsinit.wire import verdict
from nsinit.wire.verdict import ArchiveRefused, Counts, Unpacked

NUMBERS = st.integers(0, 2**64 - 1)
NAMES = st.lists(st.binary(max_size=50).map(lambda name: name.replace(b"\0", b"")), max_size=5).map(tuple)
DIGEST = hashlib.sha256(b"").hexdigest()


def read(data: bytes) -> Unpacked:
    return verdict.read(data, max_entries=100, max_bytes=1000)


@given(st.binary(max_size=5000) | st.binary(max_size=5000).map(b"-".__add__) | st.binary(max_size=99).map(b"+".__add__))
def test_whatever_it_says_is_within_bounds_or_a_printable_sentence(data: bytes) -> None:
    """The text can't move a cursor, fill a line or reach further than its own archive; nor can a member's name."""
    said: Unpacked | Exception
    try:
        said = read(data)
    except (ArchiveRefused, OSError) as error:
        said = error
    if isinstance(said, ArchiveRefused):
        assert max(len(said.reason), len(said.member)) <= verdict.MAX_TEXT
        assert f"{said}{said.member}".isprintable()
    elif isinstance(said, OSError):
        assert (data[:1], said.errno is None) == (b"!", False)
    else:
        assert isinstance(said, Unpacked)
        assert said.counts.entries <= 100


@given(st.builds(Counts, NUMBERS, NUMBERS, NUMBERS), NAMES, NAMES)
def test_numbers_beyond_what_was_asked_for_are_a_lie(
    counts: Counts, opaque: tuple[bytes, ...], privileged: tuple[bytes, ...]
) -> None:
    """Counts within the bounds come through as they were given, with all names; others are refused."""
    said = Unpacked(counts, DIGEST, opaque, privileged)
    if counts.entries <= 100 and counts.size_bytes <= 1000:
        assert read(said.encode()) == said
    else:
        with pytest.raises(ArchiveRefused, match="can't have done"):
            read(said.encode())


def test_names_are_as_many_as_it_says() -> None:
    """A name too many or too few, or one without an end, makes the whole verdict a lie."""
    whole = Unpacked(Counts(1, 0, 0), DIGEST, (b"a",), (b"4755 b",)).encode()
    for wrong in (whole + b"c\0", whole[:-2] + b"\0\0\0", whole[:-1], whole[:-7]):
        with pytest.raises(ArchiveRefused, match="can't have done"):
            read(wrong)


def test_reasons_and_faults_of_the_machine_come_through() -> None:
    """A reason names the member at fault; an errno is an error of the machine, and no fault of the archive."""
    with pytest.raises(ArchiveRefused, match="'x': no such file") as caught:
        read(verdict.refused(ArchiveRefused("no such file", "x")))
    assert (caught.value.reason, caught.value.member) == ("no such file", "x")
    with pytest.raises(OSError, match="No space left") as full:
        read(verdict.failed(errno.ENOSPC))
    assert full.value.errno == errno.ENOSPC


@pytest.mark.parametrize("text", ["\x1b[2J\u202e\n\0" * 100, "x" * 10_000, "\ud800"])
def test_a_sentence_is_cut_and_cleaned(text: str) -> None:
    """Names of members may be in it."""
    for said in (verdict.refused(ArchiveRefused(text)), verdict.refused(ArchiveRefused("no", text))):
        assert len(said) <= 2100
        with pytest.raises(ArchiveRefused) as caught:
            read(said)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("data", [b"", b"+", b"+" + bytes(71), b"?", b"{}", b"!"])
def test_half_a_verdict_is_none(data: bytes) -> None:
    """The process was killed, or another one answers."""
    with pytest.raises(ArchiveRefused, match="died"):
        read(data)


def test_directories_that_hide_what_is_below_them_are_bounded() -> None:
    """By the unpacker, and by who reads its verdict."""
    names = NameList(verdict.MAX_OPAQUE, "opaque directories")
    for number in range(verdict.MAX_OPAQUE):
        names.add(b"%d" % number)
    names.add(b"0")  # again
    with pytest.raises(ArchiveRefused, match="too many opaque directories"):
        names.add(b"one more")
    said = Unpacked(Counts(1, 0, 0), DIGEST, (b"x",) * (verdict.MAX_OPAQUE + 1))
    with pytest.raises(ArchiveRefused, match="can't have done"):
        read(said.encode())
