"""`sandkasten doctor`: the same checks as at start, as a table."""

from __future__ import annotations

import argparse

from sandkasten.cli.main import load
from sandkasten.cli.notices import image_notices
from sandkasten.runtime import precheck


def doctor(arguments: argparse.Namespace) -> int:
    """Print every check; 0 if sandboxes can be made here."""
    config = load(arguments)
    checks = precheck.run(config.data_dir)
    for check in checks:
        mark = "ok" if check.ok else "FAIL" if check.required else "note"
        print(f"{mark:<5} {check.name:<14} {check.detail}")
    for notice in [*config.notices(), *image_notices(config)]:
        print(f"note  {notice}")
    return 1 if any(check.required and not check.ok for check in checks) else 0
