"""API keys for tests, each with its token."""

from __future__ import annotations

from typing import Any

import attrs

from sandkasten.model.keys import Access, ApiKey, Label, digest_of, make_token

TEAM = Label("team", "a")


@attrs.frozen
class Issued:
    """A key, and the token that only its owner has."""

    key: ApiKey
    token: str


def issue(access: Access, **fields: Any) -> Issued:  # Any: ApiKey's fields
    """Return a new key."""
    key_id, token = make_token()
    return Issued(ApiKey(key_id, f"of-{key_id}", access, digest=digest_of(token.encode()), **fields), token)


READ, WRITE, ADMIN = (issue(access) for access in (Access.READ, Access.WRITE, Access.ADMIN))
CONFINED, CONFINED_READ = issue(Access.WRITE, label=TEAM), issue(Access.READ, label=TEAM)
ISSUED = (READ, WRITE, ADMIN, CONFINED, CONFINED_READ)
