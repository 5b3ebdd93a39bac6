"""Networks of sessions: what a configuration takes, and what rules and groups become."""

from __future__ import annotations

import attrs
import pytest

from egress.policy import MAX_RULES, parse_policy
from sandkasten.admission.network import resolve_network, rules_in_force
from sandkasten.admission.plan import spec_digest
from sandkasten.api.resources import network as _network  # noqa: F401 - adds its kinds of field
from sandkasten.api.resources.fields import check_of
from sandkasten.config import Config, Defaults, EgressSettings
from sandkasten.config.values import BUILT_IN_GROUPS
from sandkasten.model import SessionSpec
from sandkasten.model.errors import InvalidRequest, InvalidRule
from sandkasten.model.network import Network, NetworkLimits, NetworkMode

CONFIG = Config()
GROUPS = EgressSettings(groups={"python": ("mirror.example:8443",), "own": ("a.example", "a.example:80,443")})


def test_modes_are_ordered_by_reach() -> None:
    """Each mode exceeds those before it alone."""
    found = [[mode.exceeds(most) for most in NetworkMode] for mode in NetworkMode]
    assert found == [[False] * 4, [True, *[False] * 3], [True, True, False, False], [True, True, True, False]]
    assert [*NetworkMode] == ["none", "allow", "ask", "open"]


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
