"""The output cap: memory bounded, head and tail kept, no character split, every byte counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandkasten.actors.runs.waiting import CappedBytes


def _collect(pieces: list[bytes], cap: int) -> CappedBytes:
    capped = CappedBytes(cap)
    for piece in pieces:
        capped.add(piece)
    return capped


@given(st.lists(st.binary(max_size=50)), st.integers(8, 200))
def test_head_and_tail_are_kept_and_nothing_invented(pieces: list[bytes], cap: int) -> None:
    """Under the cap the bytes are exact; over it they are a prefix and a suffix of what came."""
    whole = b"".join(pieces)
    capped = _collect(pieces, cap)
    value = capped.value()
    assert capped.total == len(whole)
    assert len(value) <= max(cap, 0)
    if len(whole) <= cap:
        assert (value, capped.gap(value)) == (whole, None)
    else:
        gap = capped.gap(value)
        assert gap is not None
        assert whole.startswith(value[: gap.offset])
        assert whole.endswith(value[gap.offset :])
        assert gap.omitted_bytes == len(whole) - len(value)
        assert any(whole.startswith(value[:cut]) and whole.endswith(value[cut:]) for cut in range(len(value) + 1))
        assert len(value) >= cap - 6


@given(st.text(alphabet="aé€😀", min_size=1), st.integers(8, 64), st.integers(1, 7))
def test_the_cut_never_splits_a_character(text: str, cap: int, step: int) -> None:
    """Valid UTF-8 stays valid, wherever the cap falls and however the pieces are cut."""
    data = text.encode()
    capped = _collect([data[start : start + step] for start in range(0, len(data), step)], cap)
    capped.value().decode()


def test_memory_stays_at_the_cap() -> None:
    """A thousand times the cap leaves no more than the cap and one piece."""
    capped = CappedBytes(1024)
    for _ in range(1024):
        capped.add(b"x" * 1024)
        assert len(capped._head) + len(capped._tail) <= 1536
    assert len(capped.value()) == 1024
