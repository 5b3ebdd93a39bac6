"""`sandkasten doctor`: the checks of this machine, the protections they add up to, and leftovers, as a table or as
JSON.

Exit status 0: every required protection works; 1: one is missing; 2: wrong arguments or configuration. Needs no root,
but tries and sees less without. `--fix` makes no checks and removes leftovers; see `leftovers.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

import attrs

from sandkasten.cli.common import Stop, load, name_installation, printable
from sandkasten.cli.leftovers import LeftoverReport, as_json, as_lines, find_leftovers, fix_leftovers
from sandkasten.cli.notices import notices
from sandkasten.config import Config
from sandkasten.host import examine
from sandkasten.host.leftovers import CantLook
from sandkasten.host.protections import Situation, lacking, protections, with_needs
from sandkasten.model.node import Check, Machine, Protection, ProtectionState, Verdict

_MARKS = {
    Verdict.WORKS: "ok",
    Verdict.FALLS_BACK: "note",
    Verdict.MISSING: "note",
    Verdict.NOT_TRIED: "?",
}


def doctor(arguments: argparse.Namespace) -> int:
    """Print all checks and protections; return 0 if sandboxes can be made here."""
    try:
        config = load(arguments)
    except Stop as mistakes:
        mistakes.tell()
        return 2
    name_installation(arguments, config)
    if arguments.fix:
        return fix_leftovers(config, is_json=arguments.json)
    machine = with_needs(config, examine.examine(config.data_dir, config=config, thorough=True))
    found = protections(Situation(config, machine))
    lacks = lacking(config, found)
    if arguments.json:
        adds_up = {"protections": [attrs.asdict(each) for each in found], "lacks": lacks}
        print(json.dumps(_view(machine) | adds_up | {"leftovers": _leftovers_json(_look(config))}))
    else:
        _print_all(config, machine, found, lacks)
    return 1 if lacks else 0


def _look(config: Config) -> LeftoverReport | str:
    """Return the leftovers, or the reason why they were not looked for."""
    if os.geteuid() != 0:
        return "takes root"
    try:
        return find_leftovers(config)
    except CantLook as error:
        return str(error)


def _leftovers_json(seen: LeftoverReport | str) -> dict[str, object]:
    return {"not_looked_for": seen} if isinstance(seen, str) else as_json(seen)


def _leftovers(seen: LeftoverReport | str) -> Sequence[str]:
    return [f"{'?':<5} {'leftovers':<18} not looked for: {seen}"] if isinstance(seen, str) else as_lines(seen)


def _print_all(config: Config, machine: Machine, found: Sequence[Protection], lacks: Sequence[str]) -> None:
    _print_table(machine)
    print()
    for protection in found:
        print(f"{protection.state:<9} {protection.name:<17} {_need(protection)}{printable(protection.detail)}")
    for notice in notices(config):
        print(f"note      {printable(notice)}")
    print()
    for line in _leftovers(_look(config)):
        print(printable(line))
    print()
    for line in lacks:
        print(f"FAIL  {printable(line)}")
    if not lacks:
        print("sandboxes can be made here")


def _need(protection: Protection) -> str:
    return "required, " if protection.required and protection.state is not ProtectionState.ON else ""


def _print_table(machine: Machine) -> None:
    for check in machine.checks:
        mark = "FAIL" if check.is_fatal else _MARKS[check.verdict]
        print(f"{mark:<5} {check.title:<18} {printable(check.seen)}")
        if check.verdict is not Verdict.WORKS:
            _print_advice(check)


def _print_advice(check: Check) -> None:
    for name, text in (("means", check.consequence), ("fix", check.fix)):
        label = f"{name}:"
        for line in text.splitlines():
            print(f"{'':<24} {label} {printable(line)}")
            label = " " * len(label)


def _view(machine: Machine) -> dict[str, object]:
    return {
        "examined_at": machine.examined_at.isoformat(),
        "euid": os.geteuid(),
        "facts": dict(machine.facts),
        "checks": [attrs.asdict(check) for check in machine.checks],
    }
