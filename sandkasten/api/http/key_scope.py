"""What a key makes of a request whose handler finds or makes things: its label on what it creates, its id as the maker,
and nothing of others in what it sees. The other half of `access.py`, for routes with `Reach.FILTERED`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import attrs

from sandkasten.model import Event, Session, SessionPatch, SessionSpec
from sandkasten.model.errors import Forbidden, SessionNotFound
from sandkasten.model.keys import CONFIGURED_ID, LOCAL_ID, ApiKey
from sandkasten.model.lifecycle import ENDED
from sandkasten.model.listing import LabelSelector, SessionQuery
from sandkasten.model.workspace import EVERYWHERE, Within
from sandkasten.supervisor import Supervisor, WorkspaceSupervisor

_BETWEEN = "\x1f"
"""Between an API key's id and an idempotency key; no client can send it in one."""

_REMEMBERED = 4096


def owned_spec(key: ApiKey, spec: SessionSpec) -> SessionSpec:
    """Return what this key asks for: its label is added, it is the maker, and its idempotency keys are its own.

    Raises:
        Forbidden: the label has another value.
    """
    return attrs.evolve(
        spec,
        labels=own_labels(key, spec.labels),
        workspace_within=within(key) if spec.workspace_id is not None else {},
        key_id=key.id,
        idempotency_key=None if spec.idempotency_key is None else own_name(key, spec.idempotency_key),
    )


def owned_patch(key: ApiKey, patch: SessionPatch) -> SessionPatch:
    """Return the change with the key's label kept. Raises `Forbidden` when it would give it another value."""
    return patch if patch.labels is None else attrs.evolve(patch, labels=own_labels(key, patch.labels))


def within(key: ApiKey) -> Within:
    """Return the labels that a workspace must have to exist for this key."""
    return EVERYWHERE if key.label is None else {key.label.name: key.label.value}


def own_labels(key: ApiKey, labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels with the key's own. Raises `Forbidden` when they have another value for it."""
    if key.label is None:
        return labels
    given = labels.get(key.label.name, key.label.value)
    if given != key.label.value:
        raise Forbidden(f"this API key is confined to {key.label.name}={key.label.value}", label=key.label.name)
    return {**labels, key.label.name: key.label.value}


def own_name(key: ApiKey, name: str) -> str:
    """Return a name that no other key can give; the configured key's are those of before there were others."""
    return name if key.id in (CONFIGURED_ID, LOCAL_ID) else f"{key.id}{_BETWEEN}{name}"


def owned_query(key: ApiKey, query: SessionQuery) -> SessionQuery:
    """Return the query for what exists for this key: so a page is full of it, and its cursor tells of nothing else."""
    if key.label is None:
        return query
    return attrs.evolve(query, labels=(*query.labels, LabelSelector(key.label.name, key.label.value)))


def within_reach(key: ApiKey, sessions: Iterable[Session]) -> list[Session]:
    """Return those that exist for this key."""
    return [session for session in sessions if key.reaches(session.labels)]


def own_workspaces(key: ApiKey, supervisor: Supervisor) -> WorkspaceSupervisor:
    """Return the workspaces that exist for this key, and a way to make more of them."""
    return supervisor if key.label is None else supervisor.workspaces_within(within(key))


class EventFilter:
    """Which events one reader is shown: those of sessions within its key's reach."""

    def __init__(self, key: ApiKey, supervisor: Supervisor) -> None:
        self._key = key
        self._supervisor = supervisor
        self._ended: OrderedDict[str, bool] = OrderedDict()

    async def shows(self, told: Event) -> bool:
        """Whether this event exists for the key: by the session's labels as they are now, or were at its end."""
        if self._key.label is None:
            return True
        session_id = told.session_id
        if session_id in self._ended:
            return self._ended[session_id]
        try:
            session = await self._supervisor.get(session_id)
        except SessionNotFound:  # not kept any more: nobody knows whose it was
            return False
        is_shown = self._key.reaches(session.labels)
        if session.status in ENDED:
            self._ended[session_id] = is_shown
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        return is_shown
