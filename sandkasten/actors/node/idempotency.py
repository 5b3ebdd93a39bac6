"""Creates that carry an idempotency key: the same key and request is the same session, whenever it is repeated.

Owns the keys whose session is being made; those of sessions that were made are in their records. Makes no session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio

from sandkasten.actors.core import Ref, Reply
from sandkasten.actors.services import store as store_actor
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.admission.plan import spec_digest
from sandkasten.model import Session, SessionSpec, Status
from sandkasten.model.errors import ActorGone, Conflict, SandboxError, SandkastenError
from sandkasten.model.lifecycle import WHOLE, ended_error
from sandkasten.store.sessions import SessionRecord

_UNDOING_S = 10.0
"""How long a create may wait until what an earlier daemon had begun for its key is undone."""

_PAUSE_S = 0.05


@attrs.frozen
class _KeyInUse:
    """An idempotency key whose session is being made."""

    digest: str
    reply: Reply[Session] = attrs.field(factory=Reply)


class IdempotentCreates:
    """See the module's docstring. `create` makes a session of a spec with that digest."""

    def __init__(
        self, store: Ref, directory: SessionDirectory, create: Callable[[SessionSpec, str], Awaitable[Session]]
    ) -> None:
        self._store, self._directory, self._create = store, directory, create
        self._keys: dict[str, _KeyInUse] = {}

    async def create(self, spec: SessionSpec) -> Session:
        """Create, or answer the session that this idempotency key made before."""
        key, digest = spec.idempotency_key, spec_digest(spec)
        if key is None:
            return await self._create(spec, digest)
        if key in self._keys:
            return await self._join(self._keys[key], digest)
        use = self._keys[key] = _KeyInUse(digest)
        try:
            session = await self._made_before(key, digest) or await self._create(spec, digest)
            use.reply.set(session)
            return session
        except SandkastenError as error:
            use.reply.fail(error)
            raise
        finally:
            use.reply.fail(SandboxError("the session was not created"))  # no effect when it was answered
            del self._keys[key]

    async def _made_before(self, key: str, digest: str) -> Session | None:
        """Return the session that the key made, None if it made none.

        One that an earlier daemon did not live to finish is being undone at the moment, which frees the key: nobody was
        told of it, and nobody is. Raises `Conflict`, `SessionExpired`, or `ActorGone` when that takes too long.
        """
        give_up_at = trio.current_time() + _UNDOING_S
        while (known := await self._store.ask_again(store_actor.FindByKey(key))) is not None:
            _require_same(known.spec_digest, digest)
            session = self._latest(known)
            if session.status in WHOLE:
                return session
            if session.status is not Status.CREATING:
                raise ended_error(session)
            if trio.current_time() > give_up_at:
                raise ActorGone("what was begun with this idempotency key is being undone", session_id=session.id)
            await trio.sleep(_PAUSE_S)
        return None

    async def _join(self, use: _KeyInUse, digest: str) -> Session:
        _require_same(use.digest, digest)
        return await use.reply.wait()

    def _latest(self, record: SessionRecord) -> Session:
        entry = self._directory.get(record.session.id)
        latest = self._directory.unwritten.get(record.session.id, record)
        return entry.session if entry else latest.session


def _require_same(before: str, digest: str) -> None:
    if before != digest:
        raise Conflict("the idempotency key was used with another request")
