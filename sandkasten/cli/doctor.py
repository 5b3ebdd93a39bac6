"""`sandkasten doctor`: everything that was tried on this machine, as a table or as JSON.

Exit status 0: all that is required works; 1: something required is missing. Needs no root, but can try less without.
"""

from __future__ import annotations

import argparse
import json
import os

import attrs

from sandkasten.cli.main import load
from sandkasten.cli.notices import image_notices, protection_notices
from sandkasten.machine import Check, Machine, Verdict
from sandkasten.runtime import precheck
from sandkasten.runtime.protections import Situation, lacking, protections, with_needs

_MARKS = {
    Verdict.WORKS: "ok",
    Verdict.FALLS_BACK: "note",
    Verdict.MISSING: "note",
    Verdict.NOT_TRIED: "?",
}


def doctor(arguments: argparse.Namespace) -> int:
    """Print every check; 0 if sandboxes can be made here."""
    config = load(arguments)
    machine = with_needs(config, precheck.examine(config.data_dir))
    found = protections(Situation(config, machine))
    lacks = lacking(config, found)
    notes = [*config.notices(), *image_notices(config)]
    if arguments.json:
        print(json.dumps(_view(machine) | {"protections": [attrs.asdict(each) for each in found], "lacks": lacks}))
        return 1 if lacks else 0
    _print_table(machine)
    for line in [*protection_notices(config, machine), *notes]:
        print(f"note  {line}")
    for line in lacks:
        print(f"FAIL  {line}")
    if not lacks:
        print("sandboxes can be made here")
    return 1 if lacks else 0


def _print_table(machine: Machine) -> None:
    for check in machine.checks:
        mark = "FAIL" if check.is_fatal else _MARKS[check.verdict]
        print(f"{mark:<5} {check.title:<16} {check.seen}")
        if check.verdict is not Verdict.WORKS:
            _print_advice(check)


def _print_advice(check: Check) -> None:
    for name, text in (("means", check.consequence), ("fix", check.fix)):
        for line in text.splitlines():
            print(f"{'':<22} {name}: {line}")


def _view(machine: Machine) -> dict[str, object]:
    return {
        "examined_at": machine.examined_at.isoformat(),
        "euid": os.geteuid(),
        "facts": dict(machine.facts),
        "checks": [attrs.asdict(check) for check in machine.checks],
    }
