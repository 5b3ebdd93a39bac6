"""`sandkasten doctor`: everything that was tried on this machine, as a table or as JSON.

Exit status 0: all that is required works; 1: something required is missing; 2: wrong arguments or configuration. Needs
no root, but can try less without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import attrs

from sandkasten.cli.main import Stop, load
from sandkasten.cli.notices import image_notices
from sandkasten.machine import Check, Machine, Protection, State, Verdict
from sandkasten.runtime import precheck
from sandkasten.runtime.protections import Situation, lacking, protections, with_needs

_MARKS = {
    Verdict.WORKS: "ok",
    Verdict.FALLS_BACK: "note",
    Verdict.MISSING: "note",
    Verdict.NOT_TRIED: "?",
}


def doctor(arguments: argparse.Namespace) -> int:
    """Print every check and what they add up to; 0 if sandboxes can be made here."""
    try:
        config = load(arguments)
    except Stop as mistakes:
        for line in str(mistakes).splitlines():
            print(f"sandkasten: {line}", file=sys.stderr)
        return 2
    machine = with_needs(config, precheck.examine(config.data_dir, thorough=True))
    found = protections(Situation(config, machine))
    lacks = lacking(config, found)
    if arguments.json:
        print(json.dumps(_view(machine) | {"protections": [attrs.asdict(each) for each in found], "lacks": lacks}))
        return 1 if lacks else 0
    _print_table(machine)
    print()
    for protection in found:
        print(f"{protection.state:<9} {protection.name:<17} {_need(protection)}{_plain(protection.detail)}")
    for notice in [*config.notices(), *image_notices(config)]:
        print(f"note      {notice}")
    print()
    for line in lacks:
        print(f"FAIL  {_plain(line)}")
    if not lacks:
        print("sandboxes can be made here")
    return 1 if lacks else 0


def _need(protection: Protection) -> str:
    return "required, " if protection.required and protection.state is not State.ON else ""


def _print_table(machine: Machine) -> None:
    for check in machine.checks:
        mark = "FAIL" if check.is_fatal else _MARKS[check.verdict]
        print(f"{mark:<5} {check.title:<18} {_plain(check.seen)}")
        if check.verdict is not Verdict.WORKS:
            _print_advice(check)


def _print_advice(check: Check) -> None:
    for name, text in (("means", check.consequence), ("fix", check.fix)):
        for line in text.splitlines():
            print(f"{'':<24} {name}: {_plain(line)}")


def _view(machine: Machine) -> dict[str, object]:
    return {
        "examined_at": machine.examined_at.isoformat(),
        "euid": os.geteuid(),
        "facts": dict(machine.facts),
        "checks": [attrs.asdict(check) for check in machine.checks],
    }


def _plain(text: str) -> str:
    """A path may hold anything; a terminal gets what is printable."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
