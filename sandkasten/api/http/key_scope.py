"""The part of the world that a key with a label sees, for handlers that find or make things (`Reach.FILTERED`).

A key adds its label and its id to what it makes, and sees nothing without its label. `auth.py` checks routes that name
a session.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import attrs

from sandkasten.errors import Forbidden, SessionNotFound
from sandkasten.model import Event, Session, SessionPatch, SessionSpec
from sandkasten.model.keys import CONFIGURED_ID, LOCAL_ID, ApiKey
from sandkasten.model.lifecycle import ENDED
from sandkasten.model.listing import LabelSelector, SessionQuery
from sandkasten.model.network import Network, NetworkMode
from sandkasten.model.workspace import EVERYWHERE, Within
from sandkasten.supervisor import Supervisor, WorkspaceSupervisor

_BETWEEN = "\x1f"
"""Stands between an API key's id and an idempotency key; no client can send it in either."""

_REMEMBERED = 4096


def owned_spec(key: ApiKey, spec: SessionSpec, *, default_network: NetworkMode) -> SessionSpec:
    """Return a spec with the key's label and id, and with an idempotency key that no other key shares.

    `default_network` is the mode of a spec without a network.

    Raises:
        Forbidden: the spec has another value for the key's label, or a network beyond the key's, or a confined key
            names secrets.
    """
    _check_network(key, Network(default_network) if spec.network is None else spec.network)
    return attrs.evolve(
        spec,
        labels=own_labels(key, spec.labels),
        workspace_within=within(key) if spec.workspace_id is not None else {},
        key_id=key.id,
        idempotency_key=None if spec.idempotency_key is None else own_name(key, spec.idempotency_key),
    )


def owned_patch(key: ApiKey, patch: SessionPatch) -> SessionPatch:
    """Return a change that keeps the key's label.

    Raises:
        Forbidden: the change has another value for the key's label, or a network beyond the key's.
    """
    if patch.network is not None:
        _check_network(key, patch.network)
    return patch if patch.labels is None else attrs.evolve(patch, labels=own_labels(key, patch.labels))


def _check_network(key: ApiKey, network: Network) -> None:
    mode = network.mode
    if network.secrets and key.label is not None:  # secrets have no label: one would be for every tenant
        raise Forbidden(f"this API key is confined to {key.label.name}={key.label.value}, and may name no secrets")
    if key.max_network is not None and mode.exceeds(key.max_network):
        message = f"this API key may ask for the network mode {key.max_network.value!r} at most"
        raise Forbidden(message, needs=mode.value, has=key.max_network.value)


def within(key: ApiKey) -> Within:
    """Return the labels that a workspace must have to exist for this key."""
    return EVERYWHERE if key.label is None else {key.label.name: key.label.value}


def own_labels(key: ApiKey, labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels with the key's own. Raises `Forbidden` when the labels have another value for it."""
    if key.label is None:
        return labels
    given = labels.get(key.label.name, key.label.value)
    if given != key.label.value:
        raise Forbidden(f"this API key is confined to {key.label.name}={key.label.value}", label=key.label.name)
    return {**labels, key.label.name: key.label.value}


def own_name(key: ApiKey, name: str) -> str:
    """Return a name that no other key can give; names of the configured key stay as they are."""
    return name if key.id in (CONFIGURED_ID, LOCAL_ID) else f"{key.id}{_BETWEEN}{name}"


def owned_query(key: ApiKey, query: SessionQuery) -> SessionQuery:
    """Return a query that matches only within the key's reach, so that pages are full and cursors tell nothing else."""
    if key.label is None:
        return query
    return attrs.evolve(query, labels=(*query.labels, LabelSelector(key.label.name, key.label.value)))


def within_reach(key: ApiKey, sessions: Iterable[Session]) -> list[Session]:
    """Return the sessions within the key's reach."""
    return [session for session in sessions if key.reaches(session.labels)]


def own_workspaces(key: ApiKey, supervisor: Supervisor) -> WorkspaceSupervisor:
    """Return the supervisor of the workspaces within the key's reach."""
    return supervisor if key.label is None else supervisor.workspaces_within(within(key))


class EventFilter:
    """Selects the events of sessions within the reach of a reader's key."""

    def __init__(self, key: ApiKey, supervisor: Supervisor) -> None:
        self._key = key
        self._supervisor = supervisor
        self._ended: OrderedDict[str, bool] = OrderedDict()

    async def shows(self, told: Event) -> bool:
        """Return whether an event is shown, by the labels of its session now, or at the session's end."""
        if self._key.label is None:
            return True
        session_id = told.session_id
        if session_id in self._ended:
            return self._ended[session_id]
        try:
            session = await self._supervisor.get(session_id)
        except SessionNotFound:  # the record is gone, so its labels are unknown
            return False
        is_shown = self._key.reaches(session.labels)
        if session.status in ENDED:
            self._ended[session_id] = is_shown
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        return is_shown
