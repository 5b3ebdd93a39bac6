"""What there is of sessions and of leftovers, seen from outside: the same plan that a start makes, not carried out.

Touches nothing, and works beside a daemon: whatever may be that daemon's then counts as its own, and what it may be
about to remove is only told of if it is still there a moment later. `mend.py` removes.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from nsinit.wire.protocol import TOLD_ONLY
from sandkasten.actors.node.reconcile import (
    SESSION,
    TRASH,
    Action,
    Leftover,
    Observed,
    Plan,
    as_leftovers,
    plan_reconciliation,
)
from sandkasten.config import Config
from sandkasten.host.leftovers import CantLook, Sight, has_daemon, look
from sandkasten.host.paths import DataPaths, read_boot_id
from sandkasten.model import Session
from sandkasten.output.spool_files import SpoolFile, is_segment, list_spool
from sandkasten.store import sessions as session_store
from sandkasten.store.database import DatabaseTooNew, open_snapshot
from sandkasten.store.sessions import SessionRecord

_MOMENT_S = 1.0
"""Longer than a daemon takes from one step of removing something to the next."""


@attrs.frozen
class Remains:
    """What was seen. `is_served`: a daemon is at work. `live`: sessions that run as recorded. `unfinished`: recorded
    ones that don't, with what a start would make of them. `left`: what is nobody's. `running`: all ids of which
    something runs. `ended`: the sessions that were asked for and have ended."""

    is_served: bool = False
    live: Sequence[str] = ()
    unfinished: Mapping[str, str] = attrs.field(factory=dict)
    left: Sequence[Leftover] = ()
    running: Collection[str] = frozenset()
    sight: Sight = attrs.field(factory=Sight)
    ended: Sequence[Session] = ()


def find_remains(config: Config, *, is_ours: bool = False, ask_for: Collection[str] = ()) -> Remains:
    """Look; with `is_ours` it is this process that holds the data directory. Takes root. Raises `CantLook`."""
    if not config.data_dir.is_dir():
        return Remains()
    is_served = not is_ours and has_daemon(config.data_dir)
    seen = _look(config, is_served, ask_for)
    if is_served and seen.left:
        time.sleep(_MOMENT_S)
        still = _look(config, is_served, ask_for)
        seen = attrs.evolve(still, left=[each for each in still.left if each in seen.left])
    return seen


def as_json(remains: Remains) -> dict[str, Any]:  # JSON values
    """Return it for programs."""
    return {
        "daemon_runs": remains.is_served,
        "live": list(remains.live),
        "unfinished": [{"session_id": each, "reason": why} for each, why in remains.unfinished.items()],
        "left": [attrs.asdict(each) for each in remains.left],
    }


def lines_of(remains: Remains) -> Sequence[str]:
    """Return it for people."""
    if remains.is_served:
        summary = "a daemon is at work here, and answers for its sessions"
    else:
        summary = f"{len(remains.live)} sessions run as recorded; no daemon is at work here"
    lines = [f"{'live':<9} {SESSION:<17} {summary}"]
    lines += [f"{'unended':<9} {SESSION:<17} {each}: {why}" for each, why in remains.unfinished.items()]
    lines += [f"{'left':<9} {each.kind:<17} {describe(each, remains)}" for each in remains.left]
    if not remains.left and not remains.unfinished:
        return [*lines, f"{'left':<9} {'nothing':<17}".rstrip()]
    if not remains.unfinished and all(each.kind in TOLD_ONLY for each in remains.left):
        how = "left to you: `umount` a mount; end what runs in a cgroup"
    elif remains.is_served:
        how = "the daemon removes it within two minutes"
    else:
        how = "`sandkasten doctor --fix` removes it"
    return [*lines, f"{'':<24} fix: {how}"]


def describe(leftover: Leftover, remains: Remains) -> str:
    """Return what is to be said of one."""
    if leftover.kind in TOLD_ONLY:
        return f"{leftover.name}: left to you"
    if leftover.kind != SESSION:
        return leftover.name
    return f"{leftover.name}: {'runs' if leftover.name in remains.running else 'remains'}, and the database has it not"


def _look(config: Config, is_served: bool, ask_for: Collection[str]) -> Remains:
    files = list_spool(DataPaths(config.data_dir).spool)  # before the rows: a session has one before it has files
    try:
        with open_snapshot(config.db_path, is_in_use=is_served) as database:
            known = _Known() if database is None else _read(database, ask_for)
    except (sqlite3.Error, DatabaseTooNew, OSError) as error:
        raise CantLook(f"the database {config.db_path} can't be read: {error}") from error
    node_id = _node_id(config, known.node_id)
    live = {each.session.id for each in known.records}
    sight = look(config.data_dir, node_id, live) if node_id else Sight()
    plan = _plan(config, known.records, sight, files, is_served=is_served)
    trash = [] if is_served else [each for each in as_leftovers(sight.leftovers) if each.kind == TRASH]
    return Remains(
        is_served=is_served,
        live=[each.session_id for each in plan.of(Action.ADOPT)],
        unfinished={each.session_id: each.reason or f"{each.event}" for each in plan.of(Action.FINISH)},
        left=[*plan.news, *trash],
        running=frozenset(each.session_id for each in sight.found if each.identity is not None),
        sight=sight,
        ended=[each for each in known.asked if each.id not in live],
    )


@attrs.frozen
class _Known:
    """What the database has: the records of live sessions, the sessions that were asked for, the node's id."""

    records: Sequence[SessionRecord] = ()
    asked: Sequence[Session] = ()
    node_id: str = ""


def _read(database: sqlite3.Connection, ask_for: Collection[str]) -> _Known:
    found = [session_store.get_session(database, each) for each in ask_for]
    return _Known(
        session_store.live_sessions(database),
        [each.session for each in found if each is not None],
        session_store.node_value(database, "node_id", ""),
    )


def _plan(
    config: Config, records: Sequence[SessionRecord], sight: Sight, files: Sequence[SpoolFile], *, is_served: bool
) -> Plan:
    """Plan as a start does. Beside a daemon every id is its own, and so is all output."""
    owned = frozenset[str]()
    if is_served:
        owned = frozenset({each.session_id for each in sight.found} | {each.session.id for each in records})
        files = [each for each in files if not is_segment(each.name)]
    leftovers = as_leftovers(sight.leftovers)
    return plan_reconciliation(
        Observed(records, sight.found, read_boot_id(), leftovers, owned, is_start=True, spool=files)
    )


def _node_id(config: Config, recorded: str) -> str:
    try:
        return DataPaths(config.data_dir).node_id.read_text("ascii").strip()
    except (OSError, ValueError):
        return recorded
