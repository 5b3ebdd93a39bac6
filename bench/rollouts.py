"""Rollouts of an agent: sessions with many steps, and what a million of them would take of machines like this one."""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio

from bench import daemon, measure
from bench.links import Link, for_each

if TYPE_CHECKING:
    from bench.sections import Bench

_STEPS, _ROLLOUTS, _AT_ONCE = 150, {1: 4, 4: 16, 16: 16}, "at once"
"""Rollouts in all, by how many go on at the same time."""


async def trace(bench: Bench) -> None:
    """Rollouts of an agent that thinks for no time: a session, 150 steps of commands and files, and the session's end.
    A worker is a machine like this one, with nothing else to do."""
    with daemon.running(bench.scratch / "trace") as (_pid, address):
        bench.facts["rollouts"] = [
            await _roll(bench, address, bench.count(_STEPS, 5), bench.count(rollouts, at_once), at_once)
            for at_once, rollouts in _ROLLOUTS.items()
        ]


async def _roll(bench: Bench, address: tuple[str, int], steps: int, rollouts: int, at_once: int) -> Mapping[str, float]:
    row = bench.table.row(f"rollout of an agent, {at_once} {_AT_ONCE}")
    before, began = measure.busy_s(), trio.current_time()

    async def roll(link: Link, number: int) -> None:
        chance, start = random.Random(number), trio.current_time()  # the same steps for each number at once
        session = (await link.call("POST", "/v1/sessions", {}))["id"]
        place = f"/v1/sessions/{session}"
        try:
            for step in range(steps):
                await _step(link, place, chance, step)
        except Exception as error:  # noqa: BLE001 - a failure of the row
            row.errors.append(str(error)[:200])
        else:
            row.values.append((trio.current_time() - start) * 1000)
        await link.call("DELETE", place)

    await for_each(address, rollouts, at_once, roll)
    took, busy = trio.current_time() - began, measure.busy_s() - before
    done = len(row.values) or math.nan  # work for a rollout that failed is the others' cost
    return {
        "steps": steps,
        "rollouts": rollouts,
        _AT_ONCE: at_once,
        "core seconds per rollout": round(busy / done, 3),
        "core hours per million rollouts": round(busy / done / 3600 * 1e6, 1),
        "worker hours per million rollouts": round(took / done / 3600 * 1e6, 1),
    }


async def _step(link: Link, place: str, chance: random.Random, step: int) -> None:
    async def run(command: str, output: bytes) -> None:
        daemon.verify(await link.call("POST", f"{place}/exec", {"cmd": command}), output)

    match chance.choices(("shell", "tool", "file", "python"), (40, 30, 20, 10))[0]:
        case "shell":
            await run(f"cd /workspace && x={step}; echo $x", f"{step}\n".encode())
        case "tool":
            await run("ls -d /usr /etc | grep usr", b"/usr\n")
        case "file":
            content = base64.b64encode(f"step {step}\n".encode()).decode()
            await link.call("POST", f"{place}/fs/write", {"path": "notes", "content_base64": content})
            await run("cat /workspace/notes", f"step {step}\n".encode())
        case _:
            await run(f"python3 -c 'print({step} * 2)'", f"{step * 2}\n".encode())
