"""The network of a session: a request is checked against the configuration, and rules become those in force. Pure.

A session keeps its rules as they were written, groups among them, and the configuration in force says what a group is:
after a restart with another one the same session has the new rules. Then a session may have rules, or a mode, that the
node does not take any more, and `rules_in_force` refuses them: the caller gives such a session no way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network, ip_network

import attrs

from egress import policy
from egress.addresses import SPECIAL_V4
from nsinit.wire.protocol import MAX_BRIDGE_PORTS, MAX_BRIDGE_RULES, BridgeRule, BridgeTerms
from sandkasten.config import GROUP_MARK, Config, EgressSettings
from sandkasten.errors import InvalidRequest, InvalidRule
from sandkasten.model.network import NETWORK_LIMIT_BOUNDS, Network, NetworkLimits, NetworkMode


@attrs.frozen
class RulesInForce:
    """The rules of a session in their canonical form, with every group replaced by the group's rules."""

    allow: Sequence[str]
    deny: Sequence[str]


def resolve_network(asked: Network | None, config: Config) -> Network:
    """Return the network of a session that asks for this one, None for the configured one.

    Raises:
        InvalidRequest: the mode is beyond the operator's maximum, or a limit is out of range.
        InvalidRule: a rule is none, or there are too many.
    """
    network = Network(NetworkMode(config.defaults.network_mode)) if asked is None else asked
    bound = [name for name in ("allow", "deny", "secrets") if getattr(network, name)]
    if not network.has_way_out and (given := bound):
        problems = {f"network.{name}": "must be empty in the mode 'none'" for name in given}
        raise InvalidRequest("a rule needs a way out", **problems)
    if network.mode is NetworkMode.BRIDGE:
        _check_bridge(network)
    _check_limits(network.limits)
    rules_in_force(network, config.egress_in_force)
    return network


def _check_bridge(network: Network) -> None:
    problem = "can't be had in the mode 'bridge': it is for 'allow', 'ask' and 'open'"
    asked = {"limits": network.limits != NetworkLimits(), "secrets": network.secrets, "proxy_env": network.proxy_env}
    if problems := {f"network.{name}": problem for name, is_asked in asked.items() if is_asked}:
        raise InvalidRequest("the mode 'bridge' has neither limits nor secrets nor a proxy", **problems)


def fit_network(asked: Network | None, config: Config, *, steers: bool) -> Network:
    """Return the network of a session that asks for this one, as this kernel can have it: where it does not steer, the
    session's environment names the proxy, which is all there is."""
    network = Network(NetworkMode(config.defaults.network_mode)) if asked is None else asked
    needs_proxy = network.mode not in (NetworkMode.NONE, NetworkMode.BRIDGE) and not steers
    return network if not needs_proxy else attrs.evolve(network, proxy_env=True)


def rules_in_force(network: Network, settings: EgressSettings) -> RulesInForce:
    """Return the rules of a session as the way out takes them.

    Raises:
        InvalidRequest: the mode is beyond the operator's maximum.
        InvalidRule: a rule is none, names no group of the configuration, or there are too many.
    """
    most = NetworkMode(settings.max_mode)
    if network.mode.exceeds(most):
        setting = "egress.max_mode"
        if network.mode is NetworkMode.BRIDGE:
            setting = "isolation.allow_bridge, and egress.max_mode"
        raise InvalidRequest(
            "the network mode is above this server's maximum",
            **{"network.mode": f"must be at most {most.value!r} on this server (the operator's {setting})"},
        )
    groups = settings.groups_in_force
    allow, deny = (tuple(_expand(rules, groups)) for rules in (network.allow, network.deny))
    if network.has_way_out:
        try:
            # In the mode `bridge` the rules of a policy are the same, and the kernel keeps it.
            mode = "allow" if network.mode is NetworkMode.BRIDGE else network.mode.value
            policy.parse_policy(mode, allow, deny)
        except policy.InvalidRule as error:  # what is wrong with all rules together
            raise InvalidRule(str(error)) from None
    if network.mode is NetworkMode.BRIDGE:
        for text in (*allow, *deny):
            if not isinstance(policy.parse_rule(text).host, IPv4Network):
                raise InvalidRule(
                    f"rule {text[:100]!r}: in the mode 'bridge' rules are for IPv4 addresses and networks; "
                    "for names, use the mode 'allow' or 'open'",
                    rule=text[:100],
                )
        for name, rules in (("allow", allow), ("deny", (*deny, *settings.always_deny))):
            asked = bridge_rules(rules)
            ports = sum(len(each.ports) for each in asked)
            if len(asked) > MAX_BRIDGE_RULES or ports > MAX_BRIDGE_PORTS:
                bound = f"at most {MAX_BRIDGE_RULES} with {MAX_BRIDGE_PORTS} ports"
                raise InvalidRule(f"{len(asked)} rules to {name} with {ports} ports: {bound} in the mode 'bridge'")
    return RulesInForce(allow, deny)


def bridge_rules(rules: Sequence[str]) -> tuple[BridgeRule, ...]:
    """Return the rules of a session in the mode `bridge` as nsinit takes them; those for names are left out."""
    parsed = (policy.parse_rule(text) for text in rules)
    return tuple(
        BridgeRule(str(each.host), () if each.is_bare else each.ports)
        for each in parsed
        if isinstance(each.host, IPv4Network)
    )


def bridge_terms(config: Config, machine_resolvers: Sequence[str]) -> BridgeTerms | None:
    """Return what holds for every session in the mode `bridge`, None where no session may be in it: special addresses
    are refused but for `egress.permit`, and the name servers are the machine's unless the configuration has others."""
    isolation = config.isolation
    if not config.may_bridge:
        return None
    refused = [IPv4Network(text) for text in SPECIAL_V4]
    for permit in map(ip_network, config.egress.permit):
        if isinstance(permit, IPv4Network):
            refused = [left for each in refused for left in _without(each, permit)]
    resolvers = isolation.bridge_resolvers or tuple(machine_resolvers)
    return BridgeTerms(isolation.bridge_range, tuple(map(str, refused)), resolvers)


def _without(network: IPv4Network, taken: IPv4Network) -> Iterable[IPv4Network]:
    if network.subnet_of(taken):
        return ()
    return network.address_exclude(taken) if taken.subnet_of(network) else (network,)


def _expand(rules: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    found: dict[str, None] = {}
    for text in rules:
        if text.startswith(GROUP_MARK):
            if (members := groups.get(text.removeprefix(GROUP_MARK))) is None:
                raise InvalidRule(
                    f"rule {text[:100]!r}: this server has no such group; there are "
                    f"{', '.join(GROUP_MARK + name for name in groups)}",
                    rule=text[:100],
                )
            found |= {str(policy.parse_rule(each)): None for each in members}
            continue
        try:
            found[str(policy.parse_rule(text))] = None
        except policy.InvalidRule as error:
            raise InvalidRule(str(error), rule=text[:100]) from None
    return list(found)


def _check_limits(limits: NetworkLimits) -> None:
    problems = {}
    for name, (low, high) in NETWORK_LIMIT_BOUNDS.items():
        value = getattr(limits, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            problems[f"network.limits.{name}"] = "must be an integer"
        elif value is not None and not low <= value <= high:
            problems[f"network.limits.{name}"] = f"must be between {low} and {high}"
    if problems:
        raise InvalidRequest("limits out of range", **problems)
