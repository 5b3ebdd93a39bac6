"""Noisy neighbours: a session's commands while another session keeps the disk busy; `make bench ARGS=--neighbours`.

Every neighbour is bounded: the writers write over the same 64 MiB each, and end with the row.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from bench import measure
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.model import ExecSpec, ProcessSpec, SessionSpec, WaitFor
from sandkasten.supervisor import Supervisor

IDLE = "neighbour idle"
NOISES = {
    IDLE: "sleep 600",
    "neighbour: four writers": "for n in 1 2 3 4; do "
    "(while :; do dd if=/dev/zero of=/workspace/$n bs=1M count=64 conv=fsync,notrunc 2>/dev/null; done) & done; wait",
    "neighbour: sync loop": "python3 -c 'import os\nwhile True: os.sync()'",
}
_SPEC = ExecSpec("/bin/true")
_COMMANDS = 20
_BEGIN_S = 1.0


async def print_neighbours(scratch: Path, rounds: int) -> None:
    """Measure all rows, interleaved, and print them."""
    samples = measure.Samples()
    async with open_supervisor(Config(data_dir=scratch)) as supervisor:
        measured, noisy = [await supervisor.create(SessionSpec()) for _ in range(2)]
        for _ in range(_COMMANDS):
            await supervisor.exec(measured.id, _SPEC)
        for _ in range(rounds):
            for row, command in NOISES.items():
                async with _noise(supervisor, noisy.id, command):
                    for _ in range(_COMMANDS):
                        with samples.timed(row):
                            await supervisor.exec(measured.id, _SPEC)
    print(f"\n{'exec /bin/true, in-process':<40} {'n':>4} {'p50 ms':>9} {'ratio':>6} {'p99 ms':>9} {'ratio':>6}")
    p50, p99 = samples.median(IDLE), samples.percentile(IDLE, 99)
    for row in samples.rows():
        middle, high = samples.median(row), samples.percentile(row, 99)
        print(f"{row:<40} {samples.count(row):>4} {middle:>9.3f} {middle / p50:>6.2f} {high:>9.3f} {high / p99:>6.2f}")


@asynccontextmanager
async def _noise(supervisor: Supervisor, session_id: str, command: str) -> AsyncIterator[None]:
    process = await supervisor.start_process(session_id, ProcessSpec(command))
    await trio.sleep(_BEGIN_S)
    try:
        yield
    finally:
        await supervisor.cancel_exec(session_id, process.exec_id, now=True)
        await supervisor.wait_process(session_id, process.exec_id, WaitFor(exit=True), timeout_s=30)
