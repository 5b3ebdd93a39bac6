"""Noisy neighbours: sessions that keep the processors or the disk busy.

Every noise is bounded: writers begin again after 256 MiB, and all end with the row. The row of computing neighbours
has the same processes without a disk: a ratio like its own is the processors' doing and not the disk's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from sandkasten.model import ProcessSpec, WaitFor
from sandkasten.supervisor import Supervisor


@attrs.frozen
class Noise:
    """A command that `sessions` sessions run at the same time."""

    sessions: int
    command: str


IDLE = "neighbours idle"
_WRITE = "while :; do dd if=/dev/zero of=/workspace/big bs=1M count=256 conv={} 2>/dev/null; done"
NOISES = {
    IDLE: Noise(4, "sleep 600"),
    "four compute": Noise(4, "while :; do :; done"),
    "four write": Noise(4, _WRITE.format("notrunc")),
    "four write and fsync": Noise(4, _WRITE.format("fsync")),
    "four fsync small files": Noise(
        4,
        'python3 -c \'import os\nwhile True:\n for n in range(100):\n  f = os.open(f"/workspace/{n}", 577, 438); '
        "os.write(f, bytes(4096)); os.fsync(f); os.close(f)'",
    ),
    "one in a loop of sync": Noise(1, "python3 -c 'import os\nwhile True: os.sync()'"),
}
_BEGIN_S = 1.0


@asynccontextmanager
async def make_noise(supervisor: Supervisor, sessions: Sequence[str], command: str) -> AsyncIterator[None]:
    """Have each of the sessions run a command for as long as the block runs."""
    begun = [(each, (await supervisor.start_process(each, ProcessSpec(command))).exec_id) for each in sessions]
    await trio.sleep(_BEGIN_S)
    try:
        yield
    finally:
        for session_id, exec_id in begun:
            await supervisor.cancel_exec(session_id, exec_id, now=True)
        for session_id, exec_id in begun:
            await supervisor.wait_process(session_id, exec_id, WaitFor(exit=True), timeout_s=60)
