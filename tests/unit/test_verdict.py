"""The verdict of a process that has read a hostile archive, as nsinit takes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsinit.wire import verdict
from nsinit.wire.verdict import ArchiveRefused, Counts

NUMBERS = st.integers(0, 2**64 - 1)


def read(data: bytes) -> Counts:
    return verdict.read(data, max_members=100, max_bytes=1000)


@given(st.binary(max_size=5000) | st.binary(max_size=5000).map(b"-".__add__) | st.binary(max_size=40).map(b"+".__add__))
def test_whatever_it_says_is_numbers_or_a_printable_sentence(data: bytes) -> None:
    """The text can't move a cursor, fill a line or reach further than its own archive."""
    said: Counts | str
    try:
        said = read(data)
    except ArchiveRefused as error:
        said = str(error)
    if isinstance(said, Counts):
        assert said.members <= 100
    else:
        assert len(said) <= verdict.MAX_TEXT
        assert said.isprintable()


@given(st.builds(Counts, NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def test_numbers_beyond_what_was_asked_for_are_a_lie(counts: Counts) -> None:
    """The counts can't exceed the bounds, nor can more members be left out than there were."""
    possible = 0 < counts.members <= 100 and counts.size_bytes <= 1000
    if possible and max(counts.skipped, counts.privileged) <= counts.members:
        assert read(verdict.unpacked(counts)) == counts
    else:
        with pytest.raises(ArchiveRefused, match="can't have done"):
            read(verdict.unpacked(counts))


def test_counts_and_sentences_come_through() -> None:
    """Sound counts and sentences come through as they were given."""
    counts = Counts(100, 1000, 1, 100)
    assert read(verdict.unpacked(counts)) == counts
    with pytest.raises(ArchiveRefused, match="'x': no such file"):
        read(verdict.refused("'x': no such file"))


@pytest.mark.parametrize("sentence", ["\x1b[2J\u202e\n\0" * 100, "x" * 10_000, "\ud800"])
def test_a_sentence_is_cut_and_cleaned(sentence: str) -> None:
    """Names of members may be in it."""
    said = verdict.refused(sentence)
    assert len(said) <= verdict.MAX_VERDICT_BYTES
    with pytest.raises(ArchiveRefused) as caught:
        read(said)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("data", [b"", b"+", b"+" + bytes(31), b"+" + bytes(33), b"?", b"{}"])
def test_half_a_verdict_is_none(data: bytes) -> None:
    """The process was killed, or another one answers."""
    with pytest.raises(ArchiveRefused, match="died"):
        read(data)
