"""Parts that the programs share. The programs run in the frameworks' environment, where no test tool is.

A program is a file of scenarios: public coroutine functions of no argument, whose docstrings are the claims. It prints
a line of JSON for each. `SANDKASTEN_URL` and `SANDKASTEN_API_KEY` name the server.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from sandkasten import SandboxClient, Session

_SECONDS = 120
"""Time of a scenario on a machine that has much else to do."""


def run_all(module: Mapping[str, Any]) -> None:
    """Run the scenarios of a module, or those that the arguments name, and print what became of each."""
    printed, sys.stdout = sys.stdout, sys.stderr  # frameworks print, too
    for name, scenario in module.items():
        is_own = inspect.iscoroutinefunction(scenario) and scenario.__module__ == module["__name__"]
        if not is_own or name.startswith("_") or (sys.argv[1:] and name not in sys.argv[1:]):
            continue
        began = time.monotonic()
        trouble = None
        try:
            asyncio.run(asyncio.wait_for(scenario(), _SECONDS))
        except Exception:
            trouble = traceback.format_exc()
        print(
            json.dumps({"name": name, "trouble": trouble, "seconds": time.monotonic() - began}),
            file=printed,
            flush=True,
        )


async def raises(kind: type[BaseException], awaitable: Awaitable[object]) -> Any:  # of the kind
    """Return the error that something to be awaited must raise."""
    try:
        await awaitable
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@asynccontextmanager
async def box(**fields: Any) -> AsyncIterator[Session]:
    """Make a session for a scenario, and end it."""
    async with SandboxClient.from_env() as client, await client.create_session(**fields) as session:
        yield session


async def live(label: str) -> list[str]:
    """Return the ids of the live sessions with a label."""
    async with SandboxClient.from_env() as client:
        return [each.id async for each in client.sessions(label=label)]


async def running(session_id: str) -> list[str]:
    """Return the runs of a session that go on."""
    async with SandboxClient.from_env() as client:
        session = await client.get_session(session_id)
        return [each.command for each in await session.runs(state="running")]


async def until(condition: Any) -> None:  # a function that returns an awaitable truth value
    """Look again until a condition holds; the scenario's time ends what never comes true."""
    while not await condition():  # noqa: ASYNC110 - the server changes it
        await asyncio.sleep(0.02)
