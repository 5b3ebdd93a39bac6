"""Sessions and leftovers of a data directory: told by `sandkasten doctor`, put right by `doctor --fix`.

`find_leftovers` makes the plan that a start makes, from outside, and does not carry it out. It works beside a daemon:
everything that may be the daemon's counts as the daemon's own, and a leftover that the daemon may be about to remove is
told only if it is still there a moment later.

`fix_leftovers` holds the data directory and does now what a start and the minutes after it would do, without serving. A
fork of this process is a daemon without a front, started as `serve` starts one, where the sessions' cgroups are: it
adopts, finishes and removes, leaves live sessions running and ends. The report compares the state seen from outside
before and after.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import attrs
import trio

from nsinit.wire.protocol import TOLD_ONLY, SeccompProfile
from sandkasten import app, log
from sandkasten.actors.node.reconcile import (
    SESSION,
    TRASH,
    Leftover,
    Observed,
    Reconciliation,
    SessionAction,
    as_leftovers,
    plan_reconciliation,
)
from sandkasten.cli.common import Stop, printable, require_root
from sandkasten.cli.privilege import Means, means
from sandkasten.cli.serve import explain, look_at_machine
from sandkasten.config import Config, ConfigError, PoolSettings
from sandkasten.config.seccomp import load_filters
from sandkasten.host.data_dir import locked
from sandkasten.host.leftovers import CantLook, Survey, has_daemon, look, move_to
from sandkasten.host.paths import DataPaths, read_boot_id
from sandkasten.model import Session
from sandkasten.model.node import Machine
from sandkasten.output.disk import OutputFile, list_output_files
from sandkasten.store import sessions as session_store
from sandkasten.store.database import DatabaseTooNew, open_snapshot
from sandkasten.store.sessions import SessionRecord

_MOMENT_S = 1.0
"""Longer than a daemon takes from one step of removing something to the next."""

_SWEEPS = 2
"""A leftover that two looks find is removed; the start counts as a look."""

_ENDS_S = 60.0
_PAUSE_S = 0.05


@attrs.frozen
class LeftoverReport:
    """Sessions and leftovers at one moment.

    `is_served`: a daemon is at work. `live`: sessions that run as recorded. `unfinished`: recorded sessions that don't
    run, with the reason a start would give. `left`: the leftovers. `running`: ids of all sessions with a process.
    `ended`: those of `ask_for` that have ended.
    """

    is_served: bool = False
    live: Sequence[str] = ()
    unfinished: Mapping[str, str] = attrs.field(factory=dict)
    left: Sequence[Leftover] = ()
    running: Collection[str] = frozenset()
    survey: Survey = attrs.field(factory=Survey)
    ended: Sequence[Session] = ()


def find_leftovers(config: Config, *, is_ours: bool = False, ask_for: Collection[str] = ()) -> LeftoverReport:
    """Look, as root. `is_ours`: this process holds the data directory. Raises `CantLook`."""
    if not config.data_dir.is_dir():
        return LeftoverReport()
    is_served = not is_ours and has_daemon(config.data_dir)
    seen = _look(config, is_served, ask_for)
    if is_served and seen.left:
        time.sleep(_MOMENT_S)
        still = _look(config, is_served, ask_for)
        seen = attrs.evolve(still, left=[each for each in still.left if each in seen.left])
    return seen


def as_json(found: LeftoverReport) -> dict[str, Any]:  # JSON values
    """Return sessions and leftovers for programs."""
    return {
        "daemon_runs": found.is_served,
        "live": list(found.live),
        "unfinished": [{"session_id": each, "reason": why} for each, why in found.unfinished.items()],
        "left": [attrs.asdict(each) for each in found.left],
    }


def as_lines(found: LeftoverReport) -> Sequence[str]:
    """Return sessions and leftovers as lines for people."""
    if found.is_served:
        summary = "a daemon is at work here, and answers for its sessions"
    else:
        summary = f"{len(found.live)} sessions run as recorded; no daemon is at work here"
    lines = [f"{'live':<9} {SESSION:<17} {summary}"]
    lines += [f"{'unended':<9} {SESSION:<17} {each}: {why}" for each, why in found.unfinished.items()]
    lines += [f"{'left':<9} {each.kind:<17} {describe(each, found)}" for each in found.left]
    if not found.left and not found.unfinished:
        return [*lines, f"{'left':<9} {'nothing':<17}".rstrip()]
    if not found.unfinished and all(each.kind in TOLD_ONLY for each in found.left):
        how = "left to you: `umount` a mount, if it is no disk for the data directory; end what runs in a cgroup"
    elif found.is_served:
        how = "the daemon removes it within two minutes"
    else:
        how = "`sandkasten doctor --fix` removes it"
    return [*lines, f"{'':<24} fix: {how}"]


def describe(leftover: Leftover, found: LeftoverReport) -> str:
    """Return the line of one leftover, without its kind."""
    if leftover.kind == "mount":
        return f"{leftover.name}: left to you: it may be a disk for the data directory"
    if leftover.kind in TOLD_ONLY:
        return f"{leftover.name}: left to you"
    if leftover.kind != SESSION:
        return leftover.name
    return f"{leftover.name}: {'runs' if leftover.name in found.running else 'remains'}, and the database has it not"


def _look(config: Config, is_served: bool, ask_for: Collection[str]) -> LeftoverReport:
    # Before the rows: a session's row is older than its files.
    files = list_output_files(DataPaths(config.data_dir).spool)
    try:
        with open_snapshot(config.db_path, is_in_use=is_served) as database:
            known = _Known() if database is None else _read(database, ask_for)
    except (sqlite3.Error, DatabaseTooNew, OSError) as error:
        raise CantLook(f"the database {config.db_path} can't be read: {error}") from error
    node_id = _node_id(config, known.node_id)
    live = {each.session.id for each in known.records}
    survey = look(config.data_dir, node_id, live) if node_id else Survey()
    plan = _plan(config, known.records, survey, files, is_served=is_served)
    trash = [] if is_served else [each for each in as_leftovers(survey.leftovers) if each.kind == TRASH]
    return LeftoverReport(
        is_served=is_served,
        live=[each.session_id for each in plan.of(SessionAction.ADOPT)],
        unfinished={each.session_id: each.reason or f"{each.event}" for each in plan.of(SessionAction.FINISH)},
        left=[*plan.news, *trash],
        running=frozenset(each.session_id for each in survey.found if each.identity is not None),
        survey=survey,
        ended=[each for each in known.asked if each.id not in live],
    )


@attrs.frozen
class _Known:
    """Content of the database: records of live sessions, the sessions of `ask_for`, the node's id."""

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
    config: Config, records: Sequence[SessionRecord], survey: Survey, files: Sequence[OutputFile], *, is_served: bool
) -> Reconciliation:
    """Plan as a start does. Beside a daemon every id is the daemon's own, and so is all output."""
    owned = frozenset[str]()
    if is_served:
        owned = frozenset({each.session_id for each in survey.found} | {each.session.id for each in records})
    leftovers = as_leftovers(survey.leftovers)
    return plan_reconciliation(
        Observed(records, survey.found, read_boot_id(), leftovers, owned, is_start=True, output_files=files)
    )


def _node_id(config: Config, recorded: str) -> str:
    try:
        return DataPaths(config.data_dir).node_id.read_text("ascii").strip()
    except (OSError, ValueError):
        return recorded


# doctor --fix


def fix_leftovers(config: Config, *, is_json: bool) -> int:
    """Reconcile, print a report, return 0 if nothing is left. Raises `Stop`."""
    require_root()
    if not config.data_dir.is_dir():
        raise Stop(f"there is no data directory {config.data_dir}")
    try:
        with locked(config.data_dir):
            before = find_leftovers(config, is_ours=True)
            refuse_rivals(before)
            has_ended_well = _sweep_in_fork(config, before.survey)
            known = {*before.live, *before.unfinished}
            after = find_leftovers(config, is_ours=True, ask_for=known)
    except ConfigError as error:
        raise Stop(
            f"{error}: the daemon removes leftovers itself, every minute; to have them removed now, stop it"
        ) from None
    except CantLook as error:
        raise Stop(f"can't look for leftovers: {error}") from error
    is_clean = has_ended_well and not after.left and not after.unfinished
    if is_json:
        print(json.dumps({"ok": is_clean} | _report_json(before, after)))
    else:
        for line in _report_lines(before, after):
            print(printable(line))
        print("nothing is left over" if is_clean else "not all could be done: see above")
    return 0 if is_clean else 1


def refuse_rivals(before: LeftoverReport) -> None:
    """Raise `Stop` if sessions run in two places: those of one could be adopted, and the others would be ended."""
    if before.survey.rivals:
        places = ", ".join(before.survey.rivals)
        raise Stop(f"recorded sessions run in more than one place, so that not all could be kept: also in {places}")


def _sweep_in_fork(config: Config, survey: Survey) -> bool:
    """Run a daemon in a fork of this process, which gives root away; return whether the fork ended well."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_daemon(config, survey)
    try:
        _, status = os.waitpid(pid, 0)
    except KeyboardInterrupt:  # the fork has had the same signal, and stops in good order
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(status) == 0


def _be_daemon(config: Config, survey: Survey) -> NoReturn:
    status = 1
    try:
        _sweep_as_daemon(config, survey)
        status = 0
    except KeyboardInterrupt:
        status = 130
    except Stop as reason:
        reason.tell()
    except Exception:  # noqa: BLE001 - a fork must not go on with its parent's work
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _sweep_as_daemon(config: Config, survey: Survey) -> None:
    server = attrs.evolve(config.server, pool_sandboxes=0)
    config = attrs.evolve(config, server=server, pool=PoolSettings())  # members that a dead daemon left are removed
    try:
        machine = look_at_machine(config)
        profiles = load_filters(config.security)
        if config.nsinit_socket is None:
            move_to(survey.homes)
        with means(config, profiles, serves=False) as at_hand:
            writer = log.configure("error", format=config.server.log_format)
            try:
                trio.run(_sweep, config, machine, profiles, at_hand, strict_exception_groups=True)
            finally:
                writer.close()
    except Exception as error:
        if reason := explain(error):
            raise Stop(reason) from error
        raise


async def _sweep(config: Config, machine: Machine, profiles: Sequence[SeccompProfile], at_hand: Means) -> None:
    """Start, sweep, wait for the teardowns that were begun, and leave the live sessions alone."""
    order, warm = app.StopOrder(ends_sessions=False), app.warm_processes(config)  # else members of pools would be ended
    async with app.open_tree(
        config, machine, profiles, at_hand.start_nsinit, order, start_egress=at_hand.start_egress, warm=warm
    ) as supervisor:
        for _ in range(_SWEEPS):
            await supervisor.sweep()
        with trio.move_on_after(_ENDS_S):
            while supervisor.leftovers.in_hand:  # noqa: ASYNC110 - teardowns that the start began have no event
                await trio.sleep(_PAUSE_S)


def _removed(before: LeftoverReport, after: LeftoverReport) -> Sequence[Leftover]:
    return [each for each in before.left if each not in after.left]


def _report_json(before: LeftoverReport, after: LeftoverReport) -> dict[str, object]:
    ended = [
        {"session_id": each.id, "status": each.status, "reason": each.reason, "end_reason": each.end_reason}
        for each in after.ended
    ]
    return {
        "found": [attrs.asdict(each) for each in before.left],
        "adopted": list(after.live),
        "ended": ended,
        "removed": [attrs.asdict(each) for each in _removed(before, after)],
        "remains": [attrs.asdict(each) for each in after.left],
        "unfinished": as_json(after)["unfinished"],
    }


def _report_lines(before: LeftoverReport, after: LeftoverReport) -> Sequence[str]:
    def line(word: str, kind: str, text: str) -> str:
        return f"{word:<9} {kind:<17} {text}"

    lines = [line("found", each.kind, describe(each, before)) for each in before.left]
    lines += [line("adopted", SESSION, f"{each}: runs on") for each in after.live]
    lines += [
        line("ended", SESSION, f"{each.id}: {each.status}, {each.reason or each.end_reason}") for each in after.ended
    ]
    lines += [line("removed", each.kind, each.name) for each in _removed(before, after)]
    lines += [line("remains", each.kind, describe(each, after)) for each in after.left]
    return [*lines, *(line("remains", SESSION, f"{each}: {why}") for each, why in after.unfinished.items())]
