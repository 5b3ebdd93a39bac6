"""`sandkasten doctor --fix`: what a start and the minutes after it would do about leftovers, done now, without serving.

The data directory is held throughout. A fork of this process is a daemon without a front, started as `serve` starts
one, where the sessions' cgroups are: it adopts, finishes and removes, leaves live sessions running and ends. What came
of it is looked at from outside, before and after, so what is told here is what is there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import attrs
import trio

from nsinit.wire.protocol import SeccompProfile
from sandkasten import app, log
from sandkasten.actors.node.reconcile import SESSION, Leftover
from sandkasten.cli.common import Stop, printable, require_root
from sandkasten.cli.privilege import Means, means
from sandkasten.cli.remains import Remains, as_json, describe, find_remains
from sandkasten.cli.serve import explain, look_at_machine
from sandkasten.config import Config, ConfigError
from sandkasten.config.seccomp import load_filters
from sandkasten.host.data_dir import locked
from sandkasten.host.leftovers import CantLook, Sight, move_to
from sandkasten.model.node import Machine

_SWEEPS = 2
"""What is seen twice is removed; the start counts as a look."""
_ENDS_S = 60.0
_PAUSE_S = 0.05


def mend(config: Config, *, is_json: bool) -> int:
    """Reconcile, print what was done, return 0 if nothing is left. Raises `Stop`."""
    require_root()
    if not config.data_dir.is_dir():
        raise Stop(f"there is no data directory {config.data_dir}")
    try:
        with locked(config.data_dir):
            before = find_remains(config, is_ours=True)
            refuse_rivals(before)
            has_ended_well = _sweep_in_fork(config, before.sight)
            known = {*before.live, *before.unfinished}
            after = find_remains(config, is_ours=True, ask_for=known)
    except ConfigError as error:
        raise Stop(f"{error}: it looks for leftovers itself, every minute; to have it done now, stop it") from None
    except CantLook as error:
        raise Stop(f"it can't be seen what there is: {error}") from error
    is_clean = has_ended_well and not after.left and not after.unfinished
    if is_json:
        print(json.dumps({"ok": is_clean} | _view(before, after)))
    else:
        for line in _lines(before, after):
            print(printable(line))
        print("nothing is left over" if is_clean else "not all could be done: see above")
    return 0 if is_clean else 1


def refuse_rivals(before: Remains) -> None:
    """Raise `Stop` with sessions in two places: those of one could be adopted, and the others would be ended."""
    if before.sight.rivals:
        places = ", ".join(before.sight.rivals)
        raise Stop(f"recorded sessions run in more than one place, so that not all could be kept: also in {places}")


def _sweep_in_fork(config: Config, sight: Sight) -> bool:
    """Be a daemon in a fork of this process, which gives root away and this one does not; return whether it ended
    well."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_daemon(config, sight)
    try:
        _, status = os.waitpid(pid, 0)
    except KeyboardInterrupt:  # it has had the same signal, and stops in good order
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(status) == 0


def _be_daemon(config: Config, sight: Sight) -> NoReturn:
    status = 1
    try:
        _sweep_as_daemon(config, sight)
        status = 0
    except KeyboardInterrupt:
        status = 130
    except Stop as reason:
        for line in str(reason).splitlines():
            print(f"sandkasten: {line}", file=sys.stderr)
    except Exception:  # noqa: BLE001 - a fork must not go on with what its parent was to do
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _sweep_as_daemon(config: Config, sight: Sight) -> None:
    config = attrs.evolve(config, server=attrs.evolve(config.server, vessels=0))
    try:
        machine = look_at_machine(config)
        profiles = load_filters(config.security)
        if config.nsinit_socket is None:
            move_to(sight.homes)
        with means(config, serves=False) as at_hand:
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
    """Start, sweep, wait until all ends that were begun are over, and leave the sessions alone."""
    order = app.StopOrder(ends_sessions=False)
    async with app.open_tree(config, machine, profiles, at_hand.start_nsinit, order) as supervisor:
        for _ in range(_SWEEPS):
            await supervisor.sweep()
        with trio.move_on_after(_ENDS_S):
            while supervisor.leftovers.in_hand:  # noqa: ASYNC110 - teardowns that the start began; nobody waits for them
                await trio.sleep(_PAUSE_S)


def _removed(before: Remains, after: Remains) -> Sequence[Leftover]:
    return [each for each in before.left if each not in after.left]


def _view(before: Remains, after: Remains) -> dict[str, object]:
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


def _lines(before: Remains, after: Remains) -> Sequence[str]:
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
