"""Secrets of sessions as texts: what stands for a value in a session, and the environment that names it. Pure.

A placeholder is made of session and name under a key of the node's, so nothing of it is stored: a next daemon makes the
same. A secret may fix its own, for clients that check the form.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

import attrs

from egress.brokering import SecretFacts
from egress.protocol import SecretUse
from sandkasten.errors import InvalidRequest
from sandkasten.model.network import Network

_PLACEHOLDER_CHARS = 40


def placeholder_key(node_key: bytes) -> bytes:
    """Return the key of placeholders, which the node's key gives away and that does not give away the node's."""
    return hmac.digest(node_key, b"sandkasten placeholders", hashlib.sha256)


@attrs.frozen
class SecretTexts:
    """Secrets that a session names, and the certificate of the authority that it has to trust for them."""

    facts: Sequence[SecretFacts] = ()
    certificate: str = ""
    key: bytes = attrs.field(default=b"", repr=False)

    def uses(self, session_id: str) -> tuple[SecretUse, ...]:
        """Return the secrets as the egress process takes them."""
        return tuple(SecretUse(each.name, self._placeholder(session_id, each), each.hosts) for each in self.facts)

    def environment(
        self, session_id: str, network: Network, env: Mapping[str, str], secret_env: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Return the environment of a session: what comes with its network, placeholders, and the caller's."""
        return {**network.variables, **self.placeholders(session_id, secret_env), **env}

    def placeholders(self, session_id: str, secret_env: Mapping[str, str]) -> Mapping[str, str]:
        """Return variables with placeholders, of variables with names of secrets."""
        texts = {use.name: use.placeholder for use in self.uses(session_id)}
        return {variable: texts[name] for variable, name in secret_env.items()}

    def _placeholder(self, session_id: str, facts: SecretFacts) -> str:
        said = f"{session_id} {facts.name}".encode()
        return facts.placeholder or hmac.digest(self.key, said, hashlib.sha256).hex()[:_PLACEHOLDER_CHARS]


NO_SECRETS = SecretTexts()


def check_secret_env(secret_env: Mapping[str, str], network: Network) -> None:
    """Raise `InvalidRequest` for a variable of a secret that the session's network does not name."""
    problems = {
        f"env.{variable}": "names a secret that network.secrets does not"
        for variable, name in secret_env.items()
        if name not in network.secrets
    }
    if problems:
        raise InvalidRequest("a secret of the environment is not the session's", **problems)
