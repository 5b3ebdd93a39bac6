"""The first request to PID 1 of a new sandbox, and its answer.

A vessel's PID 1 has its socket long before it serves. What is sent while the sandbox is still being furnished it reads
as soon as it can, and not only when nsinit has told the daemon and the daemon has come back. A vessel may have died
with its nsinit, and the greeting with it; then the sandbox that was made in its place is greeted as any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from runner.wire.protocol import Hello, HelloReply, Setup
from sandkasten.actors.session.hello import accepted
from sandkasten.links.runner import RunnerLink
from sandkasten.model.errors import RunnerLost

_HELLO_S = 10.0
"""How long PID 1 may take to answer once it serves."""


async def greet(link: RunnerLink, request: Setup | Hello) -> HelloReply:
    """Ask PID 1 of a sandbox that is there. Raises `RunnerLost`, or what its refusal means."""
    with trio.move_on_after(_HELLO_S) as patience:
        return accepted(await _ask(link, request))
    assert patience.cancelled_caught
    raise _silence()


class Greeting:
    """The greeting of a sandbox that is being made. Owns the link to it until `finish` has returned it."""

    def __init__(self, run_dir: Path, request: Setup) -> None:
        self._run_dir, self._request = run_dir, request
        self._link: RunnerLink | None = None
        self._answer: Any = None  # a member of runner.protocol.ANSWERS
        self._early: trio.Event | None = None

    def begin(self, nursery: trio.Nursery) -> None:
        """Say it now, to a vessel that is about to be furnished."""
        self._early = trio.Event()
        nursery.start_soon(self._greet_early, self._early)

    async def finish(self) -> tuple[RunnerLink, HelloReply]:
        """The sandbox is built: wait for its word, and say it now if that was not done, or in vain. The link is the
        caller's. Raises what `greet` raises."""
        if self._early is not None:
            with trio.move_on_after(_HELLO_S) as patience:
                await self._early.wait()
            if patience.cancelled_caught:
                raise _silence()
        if self._link is None:
            self._link = RunnerLink(self._run_dir)
            hello = await greet(self._link, self._request)
        else:
            hello = accepted(self._answer)
        link, self._link = self._link, None
        return link, hello

    def close(self) -> None:
        """Close what nobody took."""
        if self._link is not None:
            self._link.close()

    async def _greet_early(self, is_over: trio.Event) -> None:
        try:
            self._link = RunnerLink(self._run_dir)
            self._answer = await _ask(self._link, self._request)
        except (OSError, RunnerLost):
            self.close()
            self._link = None
        finally:
            is_over.set()


async def _ask(link: RunnerLink, request: Setup | Hello) -> Any:  # a member of runner.protocol.ANSWERS
    async with link.connection() as connection:
        await connection.send_request(request)
        return await connection.receive_answer()


def _silence() -> RunnerLost:
    return RunnerLost("the sandbox's init does not answer")
