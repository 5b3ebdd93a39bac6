"""Networks of sessions: what a configuration takes, and what rules and groups become."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import attrs
import pytest

from egress.policy import MAX_RULES, parse_policy
from nsinit.wire.protocol import BridgeRule
from nsinit.wire.validate import check_bridge_terms
from sandkasten.admission.network import bridge_rules, bridge_terms, fit_network, resolve_network, rules_in_force
from sandkasten.admission.plan import spec_digest
from sandkasten.api.resources import network as _network  # noqa: F401 - adds its kinds of field
from sandkasten.api.resources.fields import check_of
from sandkasten.config import Config, Defaults, EgressSettings, IsolationSettings
from sandkasten.config.values import BUILT_IN_GROUPS
from sandkasten.errors import InvalidRequest, InvalidRule
from sandkasten.host.resolvers import usable
from sandkasten.model import SessionSpec
from sandkasten.model.network import Network, NetworkLimits, NetworkMode

CONFIG = Config()
GROUPS = EgressSettings(groups={"python": ("mirror.example:8443",), "own": ("a.example", "a.example:80,443")})


def test_modes_are_ordered_by_reach() -> None:
    """Each mode exceeds those before it alone."""
    found = [[mode.exceeds(most) for most in NetworkMode] for mode in NetworkMode]
    assert found == [[True] * place + [False] * (5 - place) for place in range(5)]
    assert [*NetworkMode] == ["none", "allow", "ask", "open", "bridge"]


def test_a_request_without_a_network_gets_the_configured_mode() -> None:
    """A request with one gets nothing of the configured one."""
    opened = Config(defaults=Defaults(network_mode="open"))
    assert resolve_network(None, CONFIG) == Network()
    assert resolve_network(None, opened) == Network("open")
    assert resolve_network(Network(), opened) == Network()


def test_rules_stay_as_they_were_written() -> None:
    """A client reads back what it sent; the rules in force are canonical."""
    network = Network("allow", ["Example.ORG.", "@python", "[2001:DB8::1]:443,80"], ["192.0.2.7"])
    assert resolve_network(network, CONFIG) == network
    found = rules_in_force(network, CONFIG.egress)
    assert found.allow == ("example.org", *BUILT_IN_GROUPS["python"], "[2001:db8::1]:80,443")
    assert found.deny == ("192.0.2.7",)


def test_every_built_in_group_is_of_rules() -> None:
    """Each can be allowed, and denied."""
    for name in BUILT_IN_GROUPS:
        found = rules_in_force(Network("allow", [f"@{name}"], [f"@{name}"]), CONFIG.egress)
        assert found.allow == found.deny
        assert parse_policy("allow", found.allow, ()).judge_name(found.allow[0].partition(":")[0]).is_allowed


def test_an_operator_s_group_replaces_the_built_in_one() -> None:
    """Others stay; a rule that is written twice is there once."""
    found = rules_in_force(Network("allow", ["@python", "@own", "a.example", "@npm"]), GROUPS)
    assert found.allow == ("mirror.example:8443", "a.example", "a.example:80,443", *BUILT_IN_GROUPS["npm"])


@pytest.mark.parametrize(
    "rule", ["*", "", "a..b", "@", "@nobody", "@Python", "2130706433", "10.0.0.1/8", "a.example:0"]
)
@pytest.mark.parametrize("place", [1, 2])
def test_a_rule_that_is_none_is_named(rule: str, place: int) -> None:
    """An unknown group that is denied is not taken for nothing."""
    with pytest.raises(InvalidRule) as refused:
        resolve_network(Network("open", ["ok.example", rule][:place], ["ok.example", rule][: 3 - place]), CONFIG)
    assert refused.value.details == {"rule": rule}
    assert repr(rule) in refused.value.message


def test_rules_are_counted_with_those_of_groups() -> None:
    """A group does not get round the bound."""
    rules = [f"a{number}.example" for number in range(MAX_RULES - 1)]
    resolve_network(Network("allow", rules, ["b.example"]), CONFIG)
    for network in (Network("allow", [*rules, "c.example"], ["b.example"]), Network("allow", rules, ["@github"])):
        with pytest.raises(InvalidRule, match=f"at most {MAX_RULES}"):
            resolve_network(network, CONFIG)


@pytest.mark.parametrize(
    ("network", "most", "fields"),
    [
        (Network("open"), "allow", ["network.mode"]),
        (Network("allow"), "none", ["network.mode"]),
        (Network("none", ["a.example"]), "open", ["network.allow"]),
        (Network("none", ["a.example"], ["b.example"]), "open", ["network.allow", "network.deny"]),
        (Network("open", limits=NetworkLimits(0, True, 2**54)), "open", ["connections", "bytes_up", "bytes_down"]),
        (Network("open", limits=NetworkLimits(connections=1.5)), "open", ["connections"]),  # type: ignore[arg-type]
    ],
)
def test_bad_fields_of_a_network_are_named(network: Network, most: str, fields: list[str]) -> None:
    """A library user's are checked as a client's; what is within the bounds passes."""
    with pytest.raises(InvalidRequest) as refused:
        resolve_network(network, Config(egress=EgressSettings(max_mode=most)))
    assert [name.removeprefix("network.limits.") for name in refused.value.details] == fields
    if fields == ["network.mode"]:
        resolve_network(network, Config(egress=EgressSettings(max_mode=network.mode.value)))


def test_no_network_and_no_word_of_it_are_one_request() -> None:
    """A create of an earlier version has the same digest; another network has another."""
    digests = {spec_digest(SessionSpec(network=each)) for each in (None, Network(), Network("none", [], []))}
    assert digests == {spec_digest(SessionSpec())}
    others = (Network("allow"), Network("open"), Network("allow", ["a.example"]), Network(log="denied"))
    assert len({spec_digest(SessionSpec(network=each)) for each in others} - digests) == len(others)
    assert attrs.evolve(Network("allow"), mode="none") == Network()


def test_a_mode_that_is_none_is_told_the_modes_as_they_are_written() -> None:
    """A caller sees no names of Python."""
    check = check_of(NetworkMode)
    assert check is not None
    with pytest.raises(ValueError, match="must be one of 'none', 'allow', 'ask', 'open'"):
        check("full")


SIXTEEN_PORTS = ",".join(map(str, range(1, 17)))
BRIDGED = Config(isolation=IsolationSettings(allow_bridge=True))


@pytest.mark.parametrize(
    ("network", "config", "named"),
    [
        (Network("bridge"), CONFIG, "isolation.allow_bridge"),
        (Network("bridge"), attrs.evolve(BRIDGED, egress=EgressSettings(max_mode="open")), "egress.max_mode"),
        (Network("bridge", limits=NetworkLimits(mbit_up=1)), BRIDGED, "limits"),
        (Network("bridge", secrets=["key"]), BRIDGED, "secrets"),
        (Network("bridge", proxy_env=True), BRIDGED, "proxy"),
        (Network("bridge", ["example.org"]), BRIDGED, "use the mode 'allow'"),
        (Network("bridge", deny=["@python"]), BRIDGED, "use the mode 'allow'"),
        (Network("bridge", ["[2001:db8::1]:443"]), BRIDGED, "IPv4"),
        (Network("bridge", [f"192.0.2.{each}:{SIXTEEN_PORTS}" for each in range(33)]), BRIDGED, "with 512 ports"),
    ],
)
def test_a_bridge_is_refused_by_name_of_what_is_in_its_way(network: Network, config: Config, named: str) -> None:
    """The setting, the field, or the rule."""
    with pytest.raises((InvalidRequest, InvalidRule)) as refused:
        resolve_network(network, config)
    assert named in f"{refused.value} {refused.value.details}"


def test_a_bridge_has_rules_for_networks_and_the_operators_terms() -> None:
    """Permitted networks are taken out of those that are refused; without ports a rule is for all of them."""
    network = Network("bridge", ["192.0.2.0/24", "192.0.2.7:443,80"])
    assert resolve_network(network, BRIDGED) == fit_network(network, BRIDGED, steers=False) == network
    rules = bridge_rules([*network.allow, "example.org"])
    assert rules == (BridgeRule("192.0.2.0/24"), BridgeRule("192.0.2.7/32", (80, 443)))
    assert bridge_terms(CONFIG, ()) is None
    permitted = attrs.evolve(BRIDGED, egress=EgressSettings(permit=("10.20.0.0/16", "172.16.0.0/12", "fd00::/8")))
    terms = bridge_terms(permitted, ("192.0.2.53",))
    assert terms is not None
    check_bridge_terms(terms)
    assert (terms.range, terms.resolvers) == ("10.213.0.0/16", ("192.0.2.53",))
    for address, is_refused in {
        "10.20.3.4": False,
        "10.21.0.1": True,
        "172.17.0.1": False,
        "169.254.1.1": True,
    }.items():
        assert any(ip_address(address) in ip_network(each) for each in terms.refused) is is_refused


def test_name_servers_of_the_loopback_are_none_of_a_bridges() -> None:
    """Three servers of IPv4 at most, in their order."""
    lines = ["# nameserver 192.0.2.1", "nameserver 127.0.0.53", "nameserver ::1", "search example.org", "nameserver"]
    lines += [f"nameserver 192.0.2.{number}" for number in range(1, 6)]
    assert usable(lines) == ("192.0.2.1", "192.0.2.2", "192.0.2.3")
