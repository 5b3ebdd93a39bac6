"""Runs a command (pytest) and, when it is over, however it ended, removes what its processes left on the machine.

A test that is killed can't clean up after itself, and neither can a killed pytest. This process is their child
subreaper, so whatever they started and forgot becomes its own child: it ends those processes by pid, removes the ground
(`tests.ground`) that the command ran on with all cgroups and directories that are left there, and exits as it did.

    python tests/guardian.py COMMAND [ARGUMENT …]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))

from tests import leaks
from tests.ground import Ground


def main(command: list[str]) -> int:
    """Run `command`, clean up after it, and return its exit status."""
    ground = Ground.claim()
    before = leaks.Snapshot.take(ground)
    # nohup(1) or a shell's `&` had them ignored: tests send them.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command as well
    status = process.wait()
    leaks.clean_up(before)
    ground.release()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
