"""The network of a session in requests and answers, its counters, and the log of what the session reached for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NewType

import attrs

from egress.brokering import SECRET_NAME
from egress.policy import MAX_RULES
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.resources.fields import (
    Between,
    Choice,
    ListLimit,
    add_kinds,
    check_environment,
    check_names,
    encodable,
    member_of,
    read_query,
)
from sandkasten.model.network import (
    EVERY_PORT,
    MAX_SESSION_SECRETS,
    NETWORK_LIMIT_BOUNDS,
    PORT_BOUNDS,
    PREVIEW_TTL_BOUNDS_S,
    EgressEntry,
    EgressLogging,
    EgressVerdict,
    Network,
    NetworkCounters,
    NetworkLimits,
    NetworkMode,
    PreviewAccess,
    PreviewSpec,
)

DEFAULT_ENTRIES = ListLimit(1000)
MAX_RULE_CHARS = 512
"""Longest rule: a name of 253 characters, and ports."""

Rules = NewType("Rules", tuple[str, ...])
Connections = NewType("Connections", int)
ByteLimit = NewType("ByteLimit", int)
Mbit = NewType("Mbit", int)
Revision = NewType("Revision", int)
PreviewPort = NewType("PreviewPort", int)
OnePort = NewType("OnePort", int)
PreviewTtl = NewType("PreviewTtl", int)
HostPort = NewType("HostPort", int)
SecretNames = NewType("SecretNames", tuple[str, ...])
SessionEnvironment = NewType("SessionEnvironment", dict[str, Any])
SessionEnvironmentPatch = NewType("SessionEnvironmentPatch", dict[str, Any])
"""Variables of a session, whose values may be secrets: `{"secret": NAME}`. In a patch a value may be null."""

_MODE = Choice(tuple(NetworkMode), not_offered=("proxy", "host"))


def _rules(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_RULES:
        raise ValueError(f"must be an array of at most {MAX_RULES} rules")
    rules = tuple(encodable(rule) for rule in value)
    if any(len(rule) > MAX_RULE_CHARS for rule in rules):
        raise ValueError(f"must hold rules of at most {MAX_RULE_CHARS} characters")
    return rules


def _secret_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_SESSION_SECRETS:
        raise ValueError(f"must be an array of at most {MAX_SESSION_SECRETS} names of secrets")
    if not all(isinstance(name, str) and SECRET_NAME.match(name) for name in value):
        raise ValueError("must hold names of secrets")
    return tuple(dict.fromkeys(value))


def _session_environment(value: object, *, may_be_null: bool = False) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of strings and secrets")
    check_names(value)
    check_environment({name: _plain(content, may_be_null=may_be_null) for name, content in value.items()})
    return dict(value)


def _plain(content: object, *, may_be_null: bool) -> object:
    """Return a variable's own text; nothing for a secret, and for null where that is a value."""
    if not isinstance(content, Mapping):
        return "" if content is None and may_be_null else content
    name = content.get("secret")
    if len(content) != 1 or not isinstance(name, str) or not SECRET_NAME.match(name):
        raise ValueError('must have strings, or {"secret": NAME} with the name of a secret')
    return ""


def split_environment(env: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the variables with values of their own, and those with names of secrets."""
    named = {name: content["secret"] for name, content in env.items() if isinstance(content, Mapping)}
    return {name: content for name, content in env.items() if name not in named}, named


add_kinds(
    {
        NetworkMode: lambda value: NetworkMode(_MODE(value)),
        EgressLogging: member_of(EgressLogging),
        EgressVerdict: member_of(EgressVerdict),
        Rules: _rules,
        Connections: Between(*NETWORK_LIMIT_BOUNDS["connections"]),
        ByteLimit: Between(*NETWORK_LIMIT_BOUNDS["bytes_up"]),
        Mbit: Between(*NETWORK_LIMIT_BOUNDS["mbit_up"]),
        Revision: Between(1, 2**53),
        PreviewPort: Between(EVERY_PORT, PORT_BOUNDS[1]),
        OnePort: Between(*PORT_BOUNDS),
        PreviewTtl: Between(*PREVIEW_TTL_BOUNDS_S),
        HostPort: Between(0, PORT_BOUNDS[1]),
        SecretNames: _secret_names,
        SessionEnvironment: _session_environment,
        SessionEnvironmentPatch: partial(_session_environment, may_be_null=True),
    }
)

# Requests -------------------------------------------------------------------------------------------------------------


@attrs.frozen
class NetworkLimitsRequest:
    """Limits of a way out; null or absent: the default."""

    connections: Connections | None = None
    bytes_up: ByteLimit | None = None
    bytes_down: ByteLimit | None = None
    mbit_up: Mbit | None = None
    mbit_down: Mbit | None = None

    @property
    def limits(self) -> NetworkLimits:
        """The model's limits."""
        return NetworkLimits(**attrs.asdict(self))


@attrs.frozen
class NetworkRequest:
    """The network of a session, or its mode alone as a string."""

    short: ClassVar[str] = "mode"
    mode: NetworkMode | None = None
    allow: Rules | None = None
    deny: Rules | None = None
    limits: NetworkLimitsRequest | None = None
    log: EgressLogging | None = None
    proxy_env: bool = False
    secrets: SecretNames | None = None

    def over(self, default: NetworkMode) -> Network:
        """Return the model's network; `default` is the mode of a request that names none."""
        return Network(
            mode=self.mode or default,
            allow=self.allow or (),
            deny=self.deny or (),
            limits=NetworkLimits() if self.limits is None else self.limits.limits,
            log=self.log or EgressLogging.ALL,
            proxy_env=self.proxy_env,
            secrets=self.secrets or (),
        )


@attrs.frozen
class PublishRequest:
    """A port that a new session has published from its start, for `ttl_seconds`, by default a day: as a preview with
    the access `local`."""

    port: OnePort
    host_port: HostPort = HostPort(0)
    ttl_seconds: PreviewTtl = PreviewTtl(PREVIEW_TTL_BOUNDS_S[1])
    keep_alive: bool = False
    resume: bool = False

    def to_spec(self) -> PreviewSpec:
        """Return the model's spec."""
        return PreviewSpec(
            port=self.port,
            ttl_s=self.ttl_seconds,
            access=PreviewAccess.LOCAL,
            keep_alive=self.keep_alive,
            resume=self.resume,
            host_port=self.host_port,
        )


@attrs.frozen
class NetworkChange(NetworkRequest):
    """A network in place of the present one, whole: what is left out is the default again."""

    mode: NetworkMode = attrs.field(kw_only=True)


@attrs.frozen
class EgressQuery:
    """The query of a log: the cursor behind which it begins, and the entries that are wanted, by default all."""

    after: str | None = None
    verdict: EgressVerdict | None = None
    host: str | None = None
    limit: ListLimit = DEFAULT_ENTRIES


# Answers --------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class NetworkBody(Body):
    """The network of a session. `revision` counts its changes, from 1."""

    mode: NetworkMode
    allow: Sequence[str]
    deny: Sequence[str]
    limits: NetworkLimits
    log: EgressLogging
    proxy_env: bool
    secrets: Sequence[str]
    revision: int


@attrs.frozen(kw_only=True)
class NetworkInfoBody(NetworkBody):
    """The network of a live session, with its counters."""

    counters: NetworkCounters


@attrs.frozen(kw_only=True)
class EgressBody(Body):
    """A page of a log, oldest first. `cursor` is `after` of the next page; `dropped` entries were lost, `missed` ones
    behind `after` are kept no more."""

    entries: Sequence[EgressEntry]
    cursor: str
    dropped: int
    missed: int


# Handlers -------------------------------------------------------------------------------------------------------------


async def read_network(exchange: Exchange) -> Answer:
    """Read a session's network and its counters."""
    found = await exchange.supervisor.network(exchange.session_id)
    return json_answer(NetworkInfoBody.take(found.network, revision=found.revision, counters=found.counters))


async def read_egress(exchange: Exchange) -> Answer:
    """Read the log of what a session reached for."""
    query = read_query(exchange, EgressQuery)
    page = await exchange.supervisor.egress_log(
        exchange.session_id, after=query.after, verdict=query.verdict, host=query.host, limit=query.limit
    )
    return json_answer(EgressBody.take(page))
