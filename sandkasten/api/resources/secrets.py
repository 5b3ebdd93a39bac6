"""Secrets: values that sessions use and nobody reads back. An answer has names and hosts, and an error no value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import attrs

from egress import brokering
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.resources.fields import Matching, add_kinds, encodable, read_request
from sandkasten.api.resources.sessions import DoneBody
from sandkasten.model.network import NewSecret

SecretName = NewType("SecretName", str)
SecretValue = NewType("SecretValue", str)
SecretHosts = NewType("SecretHosts", tuple[str, ...])
Placeholder = NewType("Placeholder", str)


def _value(value: object) -> str:
    low, high = brokering.VALUE_CHARS
    if not isinstance(value, str) or not low <= len(value) <= high or not brokering.PRINTABLE.fullmatch(value):
        raise ValueError(f"must be {low} to {high} printable ASCII characters, no space at an end")
    return value


def _hosts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= brokering.MAX_HOSTS:
        raise ValueError(f"must be an array of 1 to {brokering.MAX_HOSTS} hosts")
    return tuple(encodable(host) for host in value)


def _placeholder(value: object) -> str:
    low, high = brokering.PLACEHOLDER_CHARS
    if not isinstance(value, str) or not low <= len(value) <= high or not brokering.VISIBLE.fullmatch(value):
        raise ValueError(f"must be {low} to {high} visible ASCII characters")
    return value


add_kinds(
    {
        SecretName: Matching(brokering.SECRET_NAME, brokering.SECRET_NAME_RULE),
        SecretValue: _value,
        SecretHosts: _hosts,
        Placeholder: _placeholder,
    }
)


@attrs.frozen
class SecretRequest:
    """A secret to keep, in place of one of that name."""

    name: SecretName
    value: SecretValue = attrs.field(repr=False)
    hosts: SecretHosts
    placeholder: Placeholder | None = None

    def to_secret(self) -> NewSecret:
        """Return the model's secret."""
        return NewSecret(self.name, self.value, self.hosts, self.placeholder)


@attrs.frozen(kw_only=True)
class SecretBody(Body):
    """A kept secret, without its value."""

    name: str
    hosts: Sequence[str]
    placeholder: str | None


@attrs.frozen(kw_only=True)
class SecretsBody(Body):
    """All kept secrets."""

    secrets: Sequence[SecretBody]


async def put_secret(exchange: Exchange) -> Answer:
    """Keep a secret, whose value is never told again."""
    secret = (await read_request(exchange, SecretRequest)).to_secret()
    await exchange.supervisor.put_secret(secret)
    body = SecretBody(name=secret.name, hosts=secret.hosts, placeholder=secret.placeholder)
    return json_answer(body, status=201)


async def list_secrets(exchange: Exchange) -> Answer:
    """List the secrets by name, without their values."""
    found = await exchange.supervisor.secrets()
    return json_answer(SecretsBody(secrets=[SecretBody.take(each) for each in found]))


async def delete_secret(exchange: Exchange) -> Answer:
    """Forget a secret, and end the connections that may use it."""
    await exchange.supervisor.delete_secret(exchange.params["name"])
    return json_answer(DoneBody())
