"""Rules and policies of a way out: their texts, what they match, and that a refusal wins."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress.policy import (
    DEFAULT_PORTS,
    MAX_POLICY_CHARS,
    MAX_PORTS,
    MAX_RULES,
    Address,
    EgressRule,
    InvalidRule,
    Policy,
    Reason,
    canonical_name,
    parse_policy,
    parse_rule,
)

LABELS = st.sampled_from(["a", "b", "org", "example", "x-1", "_srv", "xn--bcher-kva"])
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PORT_NUMBERS = st.sampled_from([1, 22, 80, 443, 65535])
V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(2**125, 2**126 - 1).map(IPv6Address)
NETWORKS = st.one_of(
    st.tuples(V4, st.integers(0, 32)).map(lambda pair: IPv4Network(pair, strict=False)),
    st.tuples(V6, st.integers(3, 128)).map(lambda pair: IPv6Network(pair, strict=False)),
)
ADDRESSES = st.one_of(V4, V6, st.sampled_from(["192.0.2.1", "192.0.2.200", "2001:db8::1"]).map(ip_address))
NEAR_NETWORKS = st.sampled_from(["192.0.2.0/24", "192.0.2.1", "2001:db8::/32", "0.0.0.0/0"])
HOSTS = st.one_of(NAMES, NAMES.map("*.{}".format), NEAR_NETWORKS)


@st.composite
def rule_texts(draw: st.DrawFn) -> str:
    host, ports = draw(HOSTS), draw(st.lists(PORT_NUMBERS, max_size=3))
    if not ports:
        return host
    return f"{f'[{host}]' if ':' in host else host}:{','.join(map(str, ports))}"


RULES = rule_texts().map(parse_rule)
POLICIES = st.builds(
    Policy,
    mode=st.sampled_from(["allow", "ask", "open"]),
    allow=st.lists(RULES, max_size=4).map(tuple),
    deny=st.lists(RULES, max_size=3).map(tuple),
)


def matches(rule: EgressRule, name: str | None, address: Address | None) -> bool:
    """Compare by labels and by numbers, in another way than the code does."""
    if isinstance(rule.host, str):
        labels, given_labels = rule.host.split("."), [] if name is None else name.split(".")
        if labels[0] == "*":
            return len(given_labels) >= len(labels) and given_labels[-len(labels) + 1 :] == labels[1:]
        return labels == given_labels
    if address is None or address.version != rule.host.version:
        return False
    return int(rule.host.network_address) <= int(address) <= int(rule.host.broadcast_address)


@given(rule_texts())
def test_a_rule_and_its_text_are_one(text: str) -> None:
    """The canonical text makes the same rule, and is its own canonical text."""
    rule = parse_rule(text)
    assert parse_rule(str(rule)) == rule
    assert str(parse_rule(str(rule))) == str(rule)
    assert list(rule.ports) == sorted(set(rule.ports)) != []


@given(NETWORKS, st.sets(PORT_NUMBERS, max_size=3))
def test_a_network_and_its_text_are_one(network: IPv4Network | IPv6Network, ports: set[int]) -> None:
    """Every network can be written, of either family, with ports and without."""
    rule = EgressRule(network, tuple(sorted(ports)) or DEFAULT_PORTS, is_bare=not ports)
    assert parse_rule(str(rule)) == rule


@given(st.one_of(st.text(max_size=80), st.text(alphabet="a1.:[]/*-,x0٣。ß", max_size=30)))
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    """No text makes another error, and no rule has a host that is neither name nor network."""
    try:
        rule = parse_rule(text)
    except InvalidRule:
        return
    assert str(rule).isascii()
    assert parse_rule(str(rule)) == rule
    if isinstance(rule.host, str):
        assert canonical_name(rule.host.removeprefix("*.")) == rule.host.removeprefix("*.")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("EXAMPLE.org.", "example.org"),
        ("*.Example.org:8443,22,22", "*.example.org:22,8443"),
        ("example.org:80,443", "example.org:80,443"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example.", "xn--bcher-kva.example"),
        ("192.0.2.7/32:22", "192.0.2.7:22"),
        ("192.0.2.0/24", "192.0.2.0/24"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::/32]:443", "[2001:db8::/32]:443"),
        ("localhost", "localhost"),
    ],
)
def test_rules_have_one_form(text: str, canonical: str) -> None:
    """Case, the trailing dot, IDNA, zeros and repeated ports make no difference."""
    assert str(parse_rule(text)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", "*.", "*:443", "**.a", "a.*", "*a.org", "*.*.a", ".", ".a", "a..", "a..b", "@python", "a b"),
        *("2130706433", "0x7f.1", "0x7f000001", "127.1", "a.1", "a.0x", "1.2.3.4.5", "01.2.3.4", "256.1.1.1"),
        *("*.1.2.3.4", "１.2.3.4", "1.2.3.4/8", "1.2.3.0/255.255.255.0", "1.2.3.0/24/1", "1.2.3.4/", "a/8"),
        *("::1%lo", "fe80::1%eth0", "::ffff:1.2.3.4", "::ffff:0:0/96", "2001:db8::1/32", "[1.2.3.4]:80", "[a]:1"),
        *("[::1", "::1]:80", "[::1]80", "[::1]:", "a:", "a:0", "a:65536", "a:080", "a:-1", "a:+1", "a:8٠", "a:1,"),
        *("good@evil", "http://a", "a/b", "a\n", "a\0", "a,b", "x" * 64, ".".join(["x" * 63] * 4), "ß.de", "a。b"),
        *("\u200da.org", "ａ.org", "\ud800", "é" * 300, "a:" + ",".join(["1"] * (MAX_PORTS + 1))),
        *("\u212a.org", "\u212aü.org", "İ.org"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text: str) -> None:
    """Addresses in disguise, too much, too little, and characters that IDNA would replace."""
    with pytest.raises(InvalidRule) as caught:
        parse_rule(text)
    assert len(str(caught.value)) < 400


@given(POLICIES, st.one_of(st.none(), NAMES), st.one_of(st.none(), ADDRESSES), PORT_NUMBERS)
def test_a_rule_that_denies_wins(policy: Policy, name: str | None, address: Address | None, port: int) -> None:
    """Nothing is allowed that a rule denies, and nothing that no rule allows but in the mode `open`."""
    ruling = policy.judge(name, address, port)
    denied = [each for each in policy.deny if matches(each, name, address) and (each.is_bare or port in each.ports)]
    allowed = [
        each
        for each in policy.allow
        if matches(each, name, None if name else address) and (port in (each.ports if not each.is_bare else (80, 443)))
    ]
    is_something = name is not None or address is not None
    assert ruling.is_allowed is (is_something and not denied and (policy.mode == "open" or bool(allowed)))
    assert (ruling.reason is None) is ruling.is_allowed
    if denied and is_something:
        assert (ruling.reason, ruling.rule) == (Reason.DENIED, str(denied[0]))


@given(POLICIES, NAMES, ADDRESSES)
def test_a_name_is_resolved_if_a_port_of_it_is_allowed(policy: Policy, name: str, address: Address) -> None:
    """A connection that is allowed has a name that may be resolved, and the address alone can only take away."""
    ports = {80, 443, 7, *(port for rule in (*policy.allow, *policy.deny) for port in rule.ports)}
    by_port = {port: policy.judge(name, None, port).is_allowed for port in ports}
    assert policy.judge_name(name).is_allowed is any(by_port.values())
    for port in ports:
        assert not policy.judge(name, address, port).is_allowed or by_port[port]


@given(POLICIES, NAMES, ADDRESSES, PORT_NUMBERS)
def test_asking_allows_and_denies_what_rules_do(policy: Policy, name: str, address: Address, port: int) -> None:
    """The mode `ask` allows what `allow` does, denies what `open` does, and leaves open the rest. A name with a port
    that is left open is no name that does not exist."""
    ask, allow, open_ = (attrs.evolve(policy, mode=mode) for mode in ("ask", "allow", "open"))
    for target in ((name, None, port), (name, address, port), (None, address, port)):
        asking, allowing, opening = (each.judge(*target) for each in (ask, allow, open_))
        assert asking.is_allowed is allowing.is_allowed
        assert (asking.reason is Reason.DENIED) is (not opening.is_allowed)
        assert (asking.reason is Reason.UNANSWERED) is (opening.is_allowed and not allowing.is_allowed)
    by_name = ask.judge_name(name)
    assert by_name.is_allowed is allow.judge_name(name).is_allowed
    if ask.judge(name, None, port).reason is Reason.UNANSWERED:
        assert by_name.is_allowed or by_name.reason is Reason.UNANSWERED


def test_ports_that_are_left_out() -> None:
    """A rule that allows is for 80 and 443 then, and a rule that denies for every port."""
    policy = parse_policy("allow", ["*.org", "*.org:22"], ["bad.org", "ssh.org:22"])
    assert [policy.judge("a.org", None, port).reason for port in (80, 443, 22, 25)] == [None, None, None, Reason.PORT]
    assert [policy.judge("bad.org", None, port).reason for port in (80, 25)] == [Reason.DENIED, Reason.DENIED]
    assert [policy.judge("ssh.org", None, port).reason for port in (80, 22)] == [None, Reason.DENIED]
    assert policy.judge_name("bad.org").reason is Reason.DENIED
    assert parse_policy("allow", ["a.org:22"], ["*.org:22"]).judge_name("a.org").reason is Reason.DENIED
    assert policy.judge_name("a.net").reason is Reason.NOT_ALLOWED
    assert policy.judge_name("org").reason is Reason.NOT_ALLOWED


def test_networks_deny_names_and_allow_addresses_alone() -> None:
    """A name that resolves into a denied network is denied; one that resolves into an allowed one is not allowed."""
    address = IPv4Address("192.0.2.1")
    assert parse_policy("open", [], ["192.0.2.0/24"]).judge("a.org", address, 80).reason is Reason.DENIED
    allowing = parse_policy("allow", ["192.0.2.0/24"], [])
    assert allowing.judge(None, address, 80).rule == "192.0.2.0/24"
    assert allowing.judge("a.org", address, 80).reason is Reason.NOT_ALLOWED


def test_ipv4_within_ipv6_is_ipv4() -> None:
    """The kernel would dial the address inside, so rules are for that one."""
    mapped = IPv6Address("::ffff:192.0.2.1")
    assert parse_policy("open", [], ["192.0.2.0/24"]).judge(None, mapped, 80).reason is Reason.DENIED
    assert parse_policy("allow", ["::/0"], []).judge(None, mapped, 80).reason is Reason.NOT_ALLOWED


@pytest.mark.parametrize("name", ["2130706433", "a.0x1", "", "good@evil", "a\0", "\ud800", "[::1]", "x" * 300])
def test_no_policy_is_for_what_is_no_name(name: str) -> None:
    """Where everything is open, too."""
    policy = Policy("open")
    assert policy.judge_name(name).reason is Reason.BAD_NAME
    assert policy.judge(name, IPv4Address("1.1.1.1"), 80).reason is Reason.BAD_NAME


def test_a_mode_that_is_none_opens_nothing() -> None:
    """Neither from a text nor as a value; a connection to nothing is refused in every mode."""
    with pytest.raises(InvalidRule, match="mode 'all'"):
        parse_policy("all", [], [])
    strange = Policy("all")  # type: ignore[arg-type]
    assert not strange.judge("a.org", None, 80).is_allowed
    assert not strange.judge_name("a.org").is_allowed
    assert Policy("open").judge(None, None, 80).reason is Reason.BAD_ADDRESS


def test_a_policy_has_bounds() -> None:
    """Of rules, and of their text together; the error of a rule names the rule."""
    assert len(parse_policy("allow", ["a.org"] * MAX_RULES, []).allow) == MAX_RULES
    with pytest.raises(InvalidRule, match="257 rules"):
        parse_policy("allow", ["a.org"] * MAX_RULES, ["b.org"])
    long = f"{'x' * 63}.{'x' * 63}.{'x' * 63}.org"
    with pytest.raises(InvalidRule, match=str(MAX_POLICY_CHARS)):
        parse_policy("allow", [long] * MAX_RULES, [])
    with pytest.raises(InvalidRule, match=r"rule '127\.1'"):
        parse_policy("allow", ["a.org", "127.1"], [])
