"""Reading what the emulated machine printed, and booting it in a test."""

from __future__ import annotations

import faulthandler
import re

import pytest

from tests import debian
from tests.vm import machine


def boot_or_skip(script: str, *, is_systemd: bool = False) -> str:
    """Run a script on each processor, or as a service of systemd, and return what was printed.

    Skips where the machine can't be had.
    """
    faulthandler.cancel_dump_traceback_later()  # an emulated machine takes longer than any other test may
    try:
        printed = machine.boot(script, workers=machine.PROCESSORS, is_systemd=is_systemd)
    except debian.Unavailable as reason:
        pytest.skip(str(reason))
    print(printed)
    return printed


def statuses(printed: str, what: str) -> list[str]:
    """Return the exit status of a step on each processor."""
    return re.findall(rf"^{what}: exit status (\d+)$", printed, re.MULTILINE)


def trouble(printed: str) -> str:
    """Return the lines that say what failed, and the machine's last words."""
    failed = re.findall(r"^(?:FAILED|ERROR|E  |.*\bBROKEN\b).*$", printed, re.MULTILINE)
    return "\n".join([*failed[:60], "…", *printed.splitlines()[-30:]])
