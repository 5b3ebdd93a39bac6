"""API keys as values: access, label, quota, and the making and comparing of tokens. Pure.

A token is `sk_ID_SECRET`. The id is public: it finds the key, so that no list is searched by comparing secrets, and it
stands in records, events and log lines. Of the secret only SHA-256 is kept. Slow hashes protect secrets that people
choose; a token has 256 random bits, so guessing is hopeless, and a slow hash would only let strangers use up the
processor (NIST SP 800-63B §5.1.2.2 on look-up secrets). Knows no file, no clock and no HTTP.
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

from sandkasten.model.network import NetworkMode

KEY_ID = re.compile(r"[0-9a-f]{12}\Z")
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")
CONFIGURED_ID = "configured"
"""Id of the configuration's key in records and logs."""

LOCAL_ID = "local"
"""Id in records and logs of callers who need no key because none is configured."""

MAKER_ID = re.compile(rf"([0-9a-f]{{12}}|{CONFIGURED_ID}|{LOCAL_ID})\Z")
"""Form of a maker's id in records."""

MAX_AMOUNT = 2**31
"""Upper bound of every quota."""

_PREFIX = b"sk_"
_ID_BYTES = 6
_SECRET_BYTES = 32
_MAX_TOKEN_BYTES = 256


class Access(enum.IntEnum):
    """Access of a key; each level includes the one before.

    READ looks and changes nothing; WRITE makes and uses sessions; ADMIN also manages the node and the keys.
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
        """Whether these labels include this one."""
        return labels.get(self.name) == self.value


def _amount(_instance: object, field: attrs.Attribute[Any], value: object) -> None:
    """Check an amount: a damaged file must not look like a quota, nor a quota like none."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole or (field.name == "cpu" and isinstance(value, float))):
        raise ValueError(f"{field.name} is no amount")
    if isinstance(value, int | float) and not 0 <= value <= MAX_AMOUNT:
        raise ValueError(f"{field.name} is out of range")


@attrs.frozen
class Quota:
    """Bounds of a key's use and rates; None: no bound.

    Sessions count for the key that made them. `execs` counts running commands, processes and terminals in them.
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
    """A key without its secret. `label` None: no confinement; times are aware UTC datetimes. `max_network` is the
    widest mode of a network that the key may ask for; None: as the server allows.

    An administrator manages the whole node, so its key has no label.
    """

    id: str
    name: str
    access: Access
    label: Label | None = attrs.field(default=None, validator=_not_admin)
    quota: Quota = attrs.field(factory=Quota)
    created_at: datetime | None = None
    expires_at: datetime | None = None
    digest: bytes = attrs.field(default=b"", repr=False)
    max_network: NetworkMode | None = None

    def is_over(self, now: datetime) -> bool:
        """Whether the key has expired."""
        return self.expires_at is not None and now >= self.expires_at

    def reaches(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is within reach of the key."""
        return self.label is None or self.label.is_on(labels)

    def gives(self, other: ApiKey) -> bool:
        """Whether `other` gives its owner all that this key gave, so that uses of this key may go on."""
        names = ("digest", "access", "label", "max_network")
        return all(getattr(self, name) == getattr(other, name) for name in names)


@attrs.frozen
class KeyUsage:
    """Use of a key at one moment, and the time of its last use since the daemon's start. `execs`: running now."""

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
    """Return the digest of a token; all have one length, so that a comparison's time tells nothing."""
    return hashlib.sha256(token).digest()


def id_of(token: bytes) -> str | None:
    """Return the public id in a token, None if the token is malformed."""
    if not token.startswith(_PREFIX) or len(token) > _MAX_TOKEN_BYTES:
        return None
    key_id = token[len(_PREFIX) :].partition(b"_")[0].decode("latin-1")
    return key_id if KEY_ID.match(key_id) else None


def is_token_of(key: ApiKey | None, token: bytes) -> bool:
    """Whether a token belongs to a key. Takes the same time for a key that does not exist."""
    kept = b"" if key is None else key.digest
    return hmac.compare_digest(digest_of(token), kept or bytes(hashlib.sha256().digest_size)) and bool(kept)
