"""The API keys in force, and who is using them: finds a key by its token, and ends what goes on with one that is over.

In memory alone; `keyfile.py` has the file, `actors/services/keys.py` brings changes of it here. Whoever is served on a key does
so within a `KeyUse`, which ends when the key is revoked, changed to give less, or expires. Logs nothing of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import MappingProxyType

import trio

from sandkasten.model.errors import Unauthorized
from sandkasten.model.keys import ApiKey, id_of, is_token_of


class KeyUse:
    """A request or a connection under way: it goes on inside `running`, and `bind` says on which key, once that is
    known."""

    def __init__(self, uses: dict[str, set[KeyUse]]) -> None:
        self.scope = trio.CancelScope()
        self.key: ApiKey | None = None
        self._uses = uses

    def bind(self, key: ApiKey) -> None:
        """From here on this is served on `key`, while that is in force. To be called when the key is found."""
        self.key = key
        if key.digest:  # the configured key holds as long as the daemon
            self._uses.setdefault(key.id, set()).add(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Raises `Unauthorized` when the key ended before what goes on inside."""
        try:
            with self.scope:
                yield
        finally:
            self.leave()
        if self.scope.cancelled_caught:
            raise Unauthorized("the API key was revoked or has expired")

    def leave(self) -> None:
        """All that the key was for is done; more than once is fine."""
        if self.key is not None and self.key.id in self._uses:
            self._uses[self.key.id].discard(self)
            if not self._uses[self.key.id]:
                del self._uses[self.key.id]


class KeyRing:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._keys: dict[str, ApiKey] = {}
        self._uses: dict[str, set[KeyUse]] = {}
        self.last_used: dict[str, datetime] = {}
        self.trouble: str | None = None
        """Why the file of keys is not believed."""

    @property
    def keys(self) -> Mapping[str, ApiKey]:
        """The keys by id, expired ones included."""
        return MappingProxyType(self._keys)

    def find(self, token: bytes) -> ApiKey | None:
        """Return the key in force that has this token. Takes as long for every wrong one."""
        key_id = id_of(token)
        key = None if key_id is None else self._keys.get(key_id)
        is_right = is_token_of(key, token)
        now = datetime.now(UTC)
        if key is None or not is_right or key.is_over(now):
            return None
        self.last_used[key.id] = now
        return key

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """These are the keys now."""
        self._keys = {key.id: key for key in keys}
        self.trouble = None
        self.last_used = {key_id: moment for key_id, moment in self.last_used.items() if key_id in self._keys}
        self.end_uses()

    def end_uses(self) -> None:
        """End what goes on with keys that are gone, changed or over by now."""
        now = datetime.now(UTC)
        for key_id, uses in list(self._uses.items()):
            key = self._keys.get(key_id)
            for use in uses:
                if key is None or key.is_over(now) or use.key is None or not use.key.gives(key):
                    use.scope.cancel()

    def use(self) -> KeyUse:
        """Return what a request or a connection is to go on in."""
        return KeyUse(self._uses)
