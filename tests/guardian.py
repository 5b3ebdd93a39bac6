"""Runs a command (pytest) and, when it is over, however it ended, removes what its processes left on the machine.

A test that is killed can't clean up after itself, and neither can a killed pytest. This process is their child
subreaper, so whatever they started and forgot becomes its own child: it ends those processes by pid, removes the empty
cgroups and the directories that appeared meanwhile, and exits as the command did.

    python tests/guardian.py COMMAND [ARGUMENT …]
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))

from tests import leaks

_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run `command`, clean up after it, and return its exit status."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = leaks.Snapshot.take()
    for number in (signal.SIGHUP, signal.SIGQUIT):  # nohup(1) or a shell's `&` had them ignored: tests send them
        signal.signal(number, signal.SIG_DFL)
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command as well
    status = process.wait()
    leaks.clean_up(before)
    for directory in leaks.Snapshot.take().directories - before.directories:
        shutil.rmtree(directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
