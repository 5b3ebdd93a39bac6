"""Trace contexts: what of a `traceparent` is believed, and what is answered and passed on."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkasten.logcontext import begin

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{PARENT}-01"
FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[0-3]\Z")


def test_a_given_trace_is_joined_under_a_span_of_our_own() -> None:
    """The trace and its flags stay, the caller's span becomes the parent."""
    trace = begin(GOOD)
    assert (trace.trace_id, trace.parent_id, trace.flags) == (TRACE, PARENT, 1)
    assert trace.span_id != PARENT
    assert trace.header == f"00-{TRACE}-{trace.span_id}-01"


@pytest.mark.parametrize("flags", ["00", "01", "02", "03", "ff"])
def test_only_known_flags_are_passed_on(flags: str) -> None:
    """Bits that the standard has not given a meaning are set to zero."""
    assert begin(GOOD[:-2] + flags).flags == int(flags, 16) & 3


@pytest.mark.parametrize("value", [f"01-{TRACE}-{PARENT}-01", f"cc-{TRACE}-{PARENT}-01-and-more", f"cc{GOOD[2:]}-"])
def test_later_versions_are_read_as_far_as_they_are_known(value: str) -> None:
    """Fields that a later version puts behind the flags are passed over."""
    assert begin(value).trace_id == TRACE


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        GOOD[:-1],
        GOOD + "0",
        GOOD + "-",
        GOOD + "-00",
        GOOD + "\n",
        " " + GOOD,
        GOOD.upper(),
        f"ff{GOOD[2:]}",
        f"0x{GOOD[2:]}",
        f"cc{GOOD[2:]}.more",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-0g",
        f"00-{TRACE}-{PARENT}-\u0660\u0661",
        f"cc{GOOD[2:]}-{'x' * 1000}",
    ],
)
def test_what_is_absent_or_malformed_begins_a_new_trace(value: str | None) -> None:
    """Never an error, and never a part of what was sent."""
    trace = begin(value)
    assert FORM.match(trace.header)
    assert (trace.parent_id, trace.flags) == (None, 0)
    assert trace.trace_id != TRACE


@given(st.one_of(st.text(max_size=80), st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,9})?")))
def test_whatever_comes_what_goes_out_is_well_formed(value: str) -> None:
    """The answer's header never carries a byte that is not of the form."""
    assert FORM.match(begin(value).header)
