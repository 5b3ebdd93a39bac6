"""The contract between the daemon and the egress process: what goes through comes back, all else is refused."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress import protocol as p
from egress.policy import MAX_POLICY_CHARS, MAX_RULES

MESSAGES = (
    p.Configure(1, ("10.0.0.0/8",), ("*.bad.example",), p.UpstreamProxy("10.0.0.1", 3128, "user:secret")),
    p.AttachSession(2, "s-1", p.PolicyText("allow", ("example.org",)), p.WayOutLimits(connections=3, bytes_up=0)),
    p.SetPolicy(3, "s-1", p.PolicyText("open", deny=("192.0.2.0/24",))),
    p.DetachSession(4, "s-1"),
    p.DescribeSession(5, "s-1"),
    p.TakeSession(6),
    p.EndProcess(7),
    p.UseBroker(8),
)
REPLIES = (
    p.Configured(1, False),
    p.SessionTaken(2, "s-1"),
    p.Accomplished(2),
    p.Described(5, p.WayOutCounters(connections=7)),
    p.EgressFailed(6, "SESSION_UNKNOWN", "there is no such session"),
    p.Entries(1, (p.EgressEntry("s-1", 1.5, "tcp", "example.org", 443, "denied", reason="SNI"),)),
)


def test_every_message_comes_back_as_it_was() -> None:
    """Encoding and decoding are inverse, for every class of both directions."""
    assert {type(each) for each in MESSAGES} == set(p.REQUESTS)
    assert {type(each) for each in REPLIES} == set(p.ANSWERS)
    assert [p.decode_request(p.encode(each)) for each in MESSAGES] == list(MESSAGES)
    assert [p.decode_answer(p.encode(each)) for each in REPLIES] == list(REPLIES)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Configured"},
        {"type": None},
        {"seq": True},
        {"seq": "2"},
        {"session_id": None},
        {"policy": {"mode": "host", "allow": [], "deny": []}},
        {"policy": {"mode": "allow", "allow": [1], "deny": []}},
        {"policy": []},
        {"limits": {"connections": 0}},
        {"limits": {"idle_s": -1}},
        {"limits": {"idle_s": float("inf")}},
        {"limits": {"rate": float("nan")}},
        {"limits": {"bytes_up": 1.5}},
        {"more": 1},
    ],
)
def test_what_is_not_of_the_contract_is_refused(change: dict[str, object]) -> None:
    """A wrong type, value, field or direction is an error, not a guess."""
    body = json.loads(p.encode(MESSAGES[1]))
    assert p.decode_request(json.dumps(body).encode()) == MESSAGES[1]
    with pytest.raises(p.ProtocolError):
        p.decode_request(json.dumps({**body, **change}).encode())


def test_a_missing_field_is_refused() -> None:
    """Fields without a default must be there."""
    with pytest.raises(p.ProtocolError, match="seq"):
        p.decode_request(b'{"type":"Configure"}')


@given(
    st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(lambda each: json.dumps(each).encode())
)
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    """Any bytes are a message or a ProtocolError."""
    with pytest.raises(p.ProtocolError):
        p.decode_request(data)


def test_a_message_that_is_too_large_is_the_senders_error() -> None:
    """The longest policy that is one fits into a datagram; more bytes are refused before they are sent."""
    rule = "a" * (MAX_POLICY_CHARS // MAX_RULES)
    policy = p.PolicyText("allow", (rule,) * MAX_RULES)
    assert p.decode_request(p.encode(p.SetPolicy(1, "s" * 100, policy)))
    with pytest.raises(p.ProtocolError, match="datagram"):
        p.encode(p.SetPolicy(1, "s-1", attrs.evolve(policy, deny=policy.allow)))
