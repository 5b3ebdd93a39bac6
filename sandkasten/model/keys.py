"""API keys as values: what a key may, how many of what it may have, and how its secret is made and compared. Pure.

A key is `sk_ID_SECRET`. The id is public: it finds the key, so that no list is searched by comparing secrets, and it
stands in records, events and log lines. Of the secret only SHA-256 is kept. Slow hashes protect what people choose;
this has 256 random bits, so there is nothing to guess, and a slow hash would only let strangers burn our processor
(NIST SP 800-63B §5.1.2.2 on look-up secrets). Knows no file, no clock and no HTTP.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs

KEY_ID = re.compile(r"[0-9a-f]{12}\Z")
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")
CONFIGURED_ID = "configured"
"""In records and logs, the id of the key of the configuration."""

LOCAL_ID = "local"
"""In records and logs, the id of who needs no key because none is configured."""

MAKER_ID = re.compile(rf"([0-9a-f]{{12}}|{CONFIGURED_ID}|{LOCAL_ID})\Z")
"""What a record can say of who made something."""

MAX_AMOUNT = 2**31
"""No quota is larger."""

_PREFIX = b"sk_"
_ID_BYTES = 6
_SECRET_BYTES = 32
_MAX_TOKEN_BYTES = 256


class Access(enum.IntEnum):
    """What a key may do, each more than the one before it.

    READ looks and changes nothing; WRITE makes and uses sessions; ADMIN also sees to the node and the keys.
    """

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


@attrs.frozen
class Label:
    """The label that a key is confined to."""

    name: str
    value: str

    def is_on(self, labels: Mapping[str, str]) -> bool:
        """Whether something with these labels is within reach."""
        return labels.get(self.name) == self.value


def _amount(_instance: object, field: attrs.Attribute[Any], value: object) -> None:
    """Damage must not look like a quota, nor a quota like none."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole or (field.name == "cpu" and isinstance(value, float))):
        raise ValueError(f"{field.name} is no amount")
    if isinstance(value, int | float) and not 0 <= value <= MAX_AMOUNT:
        raise ValueError(f"{field.name} is out of range")


@attrs.frozen
class Quota:
    """How much a key may have at a time, and how fast; None: no such limit.

    Sessions count for the key that made them. `execs` counts all that runs in them: commands, processes, terminals.
    """

    sessions: int | None = attrs.field(default=None, validator=_amount)
    cpu: float | None = attrs.field(default=None, validator=_amount)
    memory_mb: int | None = attrs.field(default=None, validator=_amount)
    disk_mb: int | None = attrs.field(default=None, validator=_amount)
    execs: int | None = attrs.field(default=None, validator=_amount)
    creates_per_minute: int | None = attrs.field(default=None, validator=_amount)
    requests_per_second: int | None = attrs.field(default=None, validator=_amount)


def _not_admin(instance: ApiKey, _field: object, value: Label | None) -> None:
    if value is not None and instance.access is Access.ADMIN:
        raise ValueError("an administrator's key can't be confined to a label")


@attrs.frozen
class ApiKey:
    """A key without its secret. `label` None: it reaches everything of its access; times are aware UTC datetimes.

    An administrator sees to the whole node, so its key has no label.
    """

    id: str
    name: str
    access: Access
    label: Label | None = attrs.field(default=None, validator=_not_admin)
    quota: Quota = attrs.field(factory=Quota)
    created_at: datetime | None = None
    expires_at: datetime | None = None
    digest: bytes = attrs.field(default=b"", repr=False)

    def is_over(self, now: datetime) -> bool:
        """Whether its time has passed."""
        return self.expires_at is not None and now >= self.expires_at

    def reaches(self, labels: Mapping[str, str]) -> bool:
        """Whether something with these labels exists for this key."""
        return self.label is None or self.label.is_on(labels)

    def gives(self, other: ApiKey) -> bool:
        """Whether `other` gives its owner all that this one gave: who uses this one may go on."""
        return (self.digest, self.access, self.label) == (other.digest, other.access, other.label)


@attrs.frozen
class KeyUsage:
    """What a key has at one moment, and when it was last used since the daemon's start. `execs` counts what runs."""

    sessions: int = 0
    cpu: float = 0.0
    memory_mb: int = 0
    disk_mb: int = 0
    execs: int = 0
    last_used_at: datetime | None = None


NOBODY = ApiKey("", "nobody", Access.NONE)
CONFIGURED = ApiKey(CONFIGURED_ID, "the configured key", Access.ADMIN)
LOCAL = ApiKey(LOCAL_ID, "whoever is on this machine", Access.ADMIN)


def make_token() -> tuple[str, str]:
    """Return the id of a new key, and the token that is shown once."""
    key_id = secrets.token_hex(_ID_BYTES)
    return key_id, f"sk_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"


def digest_of(token: bytes) -> bytes:
    """Return what is kept of a token; of equal length for all, so that comparing tells nothing of theirs."""
    return hashlib.sha256(token).digest()


def id_of(token: bytes) -> str | None:
    """Return the public id that a token names, None if it is none of our tokens."""
    if not token.startswith(_PREFIX) or len(token) > _MAX_TOKEN_BYTES:
        return None
    key_id = token[len(_PREFIX) :].partition(b"_")[0].decode("latin-1")
    return key_id if KEY_ID.match(key_id) else None


def is_token_of(key: ApiKey | None, token: bytes) -> bool:
    """Whether it is the token of that key. Takes as long for a key that is not there."""
    kept = b"" if key is None else key.digest
    return hmac.compare_digest(digest_of(token), kept or bytes(hashlib.sha256().digest_size)) and bool(kept)
