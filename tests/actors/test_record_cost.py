"""Cost of an ended run's record: the size counted for it, beside its texts, is no less than the memory it takes."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
import trio

from sandkasten.actors.runs.persistence import text_bytes
from sandkasten.actors.runs.run import Run, RunRequest
from sandkasten.model import Cause, ExecEnd, ExecSpec, Usage
from sandkasten.output.store import OutputStore, SessionOutput

RUNS = 500
USAGE = Usage(1000, 2000, 3000)


def end_one(logs: SessionOutput, number: int, command: str) -> Run:
    """Begin a run and end it without output, as a session does."""
    run = Run(RunRequest(ExecSpec(command, exec_id=f"chosen-{number}"), timeout_ms=1000))
    run.join(logs.open(run.exec_id), cancel=lambda run, now: None, wake=trio.lowlevel.checkpoint)
    run.admit(None)
    run.begin(1000 + number)
    run.finish(
        ExecEnd(run.exec_id, 0, None, Cause.EXITED, f"/w/{number}", 12, 1000, shell_restarted=False, usage=USAGE)
    )
    logs.retire(run.exec_id, text_bytes=text_bytes(run))
    return run


@pytest.mark.slow
async def test_an_ended_run_takes_no_more_than_it_is_counted_with(tmp_path: Path) -> None:
    """Measured on a few hundred of them, with short commands and long ones."""
    for length in (10, 3000):
        logs = OutputStore(tmp_path).session(str(length))
        commands = [f"{number:0{length}}" for number in range(RUNS)]
        end_one(logs, RUNS, ":")
        gc.collect()
        tracemalloc.start()
        try:
            before_bytes = logs.bytes_used
            runs = [end_one(logs, number, command) for number, command in enumerate(commands)]
            gc.collect()
            taken_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        counted_bytes = logs.bytes_used - before_bytes
        assert len(runs) == RUNS
        assert taken_bytes + sum(map(len, commands)) <= counted_bytes < 3 * taken_bytes + sum(map(len, commands))
