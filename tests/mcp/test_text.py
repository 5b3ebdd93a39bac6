"""Text for models: what is cut, what is removed, and how the end of a command reads."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkasten.mcp.text import MAX_CHARS, clean, ending, shorten, words_of_size
from sandkasten.sdk.types import RunEnd
from tests.waiting import patience


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("\x1b[1;31mred\x1b[0m\n", "red\n"),
        ("\x1b]0;title\x07$ \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", "$ link\n"),
        ("10 %\r50 %\r100 %\n", "100 %\n"),
        ("dos\r\nlines\r\n", "dos\nlines\n"),
        ("no end\r", "no end"),
        ("\x1b", "\x1b"),
        ("a\x1b]b\nnot hidden\nlast\n", "a\x1b]b\nnot hidden\nlast\n"),
        (f"a\x1b]{'b' * 5000}\x07", f"a\x1b]{'b' * 5000}\x07"),
    ],
)
def test_text_is_what_stands_on_a_screen(raw: str, cleaned: str) -> None:
    """Escape sequences and overwritten states of a progress bar cost a model tokens and tell nothing."""
    assert clean(raw) == cleaned


@given(st.text())
def test_cleaning_ends_and_is_done_once(text: str) -> None:
    """Hostile output is no reason to hang, and text that is clean stays as it is."""
    once = clean(text)
    assert "\r" not in once
    assert clean(once) == once or "\x1b" in once


@pytest.mark.parametrize("unit", ["a", "\r", "\x1b]", "\x1b[", "a\r", "\x1b]a\n"])
def test_cleaning_takes_time_in_proportion(unit: str) -> None:
    """Five MiB of anything, which a program in a sandbox may print, take a moment of the daemon's loop."""
    text = unit * (5 * 2**20 // len(unit))
    began = time.process_time()
    shorten(clean(text))
    assert time.process_time() - began < patience(1.5)


@given(st.text(alphabet="ab\n", max_size=400), st.integers(20, 100))
def test_long_text_loses_its_middle(text: str, most: int) -> None:
    """Head and tail stay, and a line between them says how much is missing."""
    short, is_cut = shorten(text, "ask for the rest", max_chars=most)
    assert is_cut == (len(text) > most)
    if not is_cut:
        assert short == text
        return
    head, _, rest = short.partition("… ")
    gap, _, tail = rest.partition(" …\n")
    assert text.startswith(head.removesuffix("\n"))
    assert text.endswith(tail)
    assert gap.endswith("left out; ask for the rest")
    assert len(head) + len(tail) <= most + 1


def test_a_cut_falls_between_lines_where_lines_are_short() -> None:
    """A model reads whole lines on both sides of the gap."""
    short, _ = shorten("".join(f"{number}\n" for number in range(20_000)))
    head, _, tail = short.partition("… ")
    assert head.endswith("\n")
    assert tail.partition("\n")[2].partition("\n")[0].isdigit()
    assert len(short) < MAX_CHARS + 100


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1234, "1.2 kB"),
        (999_960, "1.0 MB"),
        (1_200_000, "1.2 MB"),
        (5e12, "5000.0 GB"),
    ],
)
def test_sizes_are_words(count: float, words: str) -> None:
    """Powers of 1000, as in the rest of the interface."""
    assert words_of_size(int(count)) == words


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (RunEnd(1, "/workspace", 2345), "[exit 1, 2.3 s, cwd /workspace]"),
        (RunEnd(3, "/", 0, shell_restarted=True), "[exit 3, shell restarted, 0.0 s, cwd /]"),
        (RunEnd(124, "/", 500, cause="timed_out", timeout_ms=500), "[timed out after 0.5 s, shell kept, 0.5 s, cwd /]"),
        (
            RunEnd(137, "/", 10, cause="oom", victim="node"),
            "[killed: out of memory (node), exit 137, shell kept, 0.0 s, cwd /]",
        ),
        (RunEnd(1, "", 10, cause="disk_full"), "[failed: the disk is full, exit 1, 0.0 s]"),
    ],
)
def test_the_end_of_a_command_is_one_line(end: RunEnd, line: str) -> None:
    """The true cause comes first."""
    assert ending(end) == line
