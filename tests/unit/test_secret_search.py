"""The search for values in what a server says, and the texts that stand for them."""

from __future__ import annotations

import base64
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress.brokering import SecretFacts
from egress.policy import Reason
from egress.substitution import EchoFound, EchoSearch, SecretGuard
from sandkasten.admission.secrets import SecretTexts, check_secret_env
from sandkasten.errors import InvalidRequest
from sandkasten.model.network import TRUST_VARIABLES, Network, NetworkMode

VALUE = b"aabaabaac-value"
NETWORK = Network(NetworkMode.OPEN, secrets=["key"])


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Return the data, cut at these places."""
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[first:last] for first, last in pairwise(at)]


@given(st.text("aabc-value", max_size=60), st.lists(st.integers(0, 1000), max_size=12))
def test_other_bytes_come_through_in_any_pieces(text: str, cuts: list[int]) -> None:
    """Bytes that look like the value for a while are whole at the end of the stream."""
    data = text.encode()
    search = EchoSearch()
    search.add(VALUE)
    if VALUE in data:
        return
    assert b"".join(map(search.feed, pieces(data, cuts))) + search.feed(b"") == data


@given(
    st.text("aabc-value", max_size=30), st.text("aabc-value", max_size=30), st.lists(st.integers(0, 1000), max_size=12)
)
def test_the_value_is_found_in_any_pieces(before: str, after: str, cuts: list[int]) -> None:
    """At most three of its signs are out by then."""
    out = let_out(pieces(before.encode() + VALUE + after.encode(), cuts))
    at = (before.encode() + VALUE).index(VALUE)
    assert len(out) <= at + 3


def test_the_bytes_of_a_value_alone_are_found() -> None:
    """One sign at a time is no way around the search."""
    assert let_out([bytes([sign]) for sign in VALUE]) == VALUE[:3]


def let_out(data: list[bytes]) -> bytes:
    """Return what a search lets out of a stream that has the value in it, before the value is found."""
    search, out = EchoSearch(), b""
    search.add(VALUE)
    try:
        for piece in data:
            out += search.feed(piece)
    except EchoFound:
        return out
    raise AssertionError("the value was not found")


@given(st.binary(max_size=9), st.binary(max_size=9), st.sampled_from([b"+/", b"-_"]))
def test_a_value_in_base64_is_found(before: bytes, after: bytes, signs: bytes) -> None:
    """The place in the text does not matter, nor whether credentials were sent."""
    guard = SecretGuard("a.example", 443, {b"placeholder": b"~~~?>?value"})
    guard.from_client(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
    coded = base64.b64encode(before + b"~~~?>?value" + after, signs)
    step = guard.from_server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(coded), coded))
    assert (step.is_over, step.refused) == (True, Reason.ECHO)


def test_placeholders_are_a_sessions_own_and_stay() -> None:
    """Another session has another one, a restarted daemon the same; a secret's own is for all."""
    texts = SecretTexts((SecretFacts("key", ("a.example",)),), key=b"node")
    (here,), (there,), (again,) = (texts.uses(each) for each in ("s-1", "s-2", "s-1"))
    assert here == again
    assert here.placeholder != there.placeholder
    fixed = SecretTexts((SecretFacts("key", ("a.example",), "sk-0123456789abcdef"),), key=b"node")
    assert fixed.uses("s-1")[0].placeholder == fixed.uses("s-2")[0].placeholder == "sk-0123456789abcdef"


def test_the_callers_variables_go_before_those_of_the_network() -> None:
    """A caller that sets a bundle of its own keeps it."""
    texts = SecretTexts((SecretFacts("key", ("a.example",)),), key=b"node")
    env = texts.environment("s-1", NETWORK, {"PIP_CERT": "/own.pem"}, {"TOKEN": "key"})
    assert env == {**TRUST_VARIABLES, "TOKEN": texts.uses("s-1")[0].placeholder, "PIP_CERT": "/own.pem"}


def test_a_variable_names_a_secret_of_the_network() -> None:
    """Else the session would have a placeholder that nothing replaces."""
    check_secret_env({"TOKEN": "key"}, NETWORK)
    with pytest.raises(InvalidRequest):
        check_secret_env({"TOKEN": "other"}, NETWORK)


def test_a_guard_cuts_the_bytes_after_a_101() -> None:
    """The bytes of a WebSocket are searched as those of a body are."""
    guard = SecretGuard("a.example", 443, {b"placeholder": VALUE})
    head = b"GET / HTTP/1.1\r\nHost: a.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX: placeholder\r\n\r\n"
    assert b"X: " + VALUE in guard.from_client(head).to_server
    answer = b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    assert guard.from_server(answer).wants_raw
    step = guard.from_server(b"\x81\x0f" + VALUE)
    assert (step.is_over, step.refused, step.to_client) == (True, Reason.ECHO, b"")


def test_a_refusal_says_nothing_of_the_servers_bytes() -> None:
    """An answer that is no HTTP may have the value where an error would show it."""
    guard = SecretGuard("a.example", 443, {b"placeholder": VALUE})
    guard.from_client(b"GET / HTTP/1.1\r\nHost: a.example\r\nX: placeholder\r\n\r\n")
    step = guard.from_server(VALUE + b"\r\n\r\n")
    assert step.to_client.startswith(b"HTTP/1.1 502 ")
    assert VALUE not in step.to_client
