"""The first request to PID 1 of a new sandbox, and its answer.

A vessel's PID 1 has its socket long before it serves. What is sent while the sandbox is still being furnished it reads
as soon as it can, and not only when nsinit has told the daemon and the daemon has come back. A vessel may have died
with its nsinit, and the greeting with it; then the sandbox that was made in its place is greeted as any other.

What PID 1 of a new sandbox is asked first, and what its answer means to whoever made the session.

Pure: `greeting.py` asks.

How long each phase of a create took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from runner.wire import protocol
from runner.wire.protocol import Hello, HelloReply, Setup
from sandkasten.actors.session.setup import Creation
from sandkasten.links.runner import RunnerLink
from sandkasten.model.errors import (
    InvalidImage,
    InvalidRequest,
    RunnerLost,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
)

_VERSIONS = range(protocol.OLDEST_VERSION, protocol.PROTOCOL_VERSION + 1)
"""What PID 1 may speak: that of a sandbox is as old as the sandbox."""


def first_request(creation: Creation, graces: protocol.Graces) -> protocol.Setup:
    """Return what PID 1 of the new sandbox is asked first."""
    options = creation.resolved.options
    rules = options.filesystem
    return protocol.Setup(
        env=dict(creation.env),
        shell=creation.resolved.shell,
        graces=graces,
        user=options.user,
        files=None if rules is None else protocol.FileRules(_listed(rules.readable), _listed(rules.writable)),
    )


def accepted(answer: object) -> protocol.HelloReply:
    """Return the answer if it is what it should be.

    Raises:
        SandboxError: it speaks another version, or was never set up: then nobody was told of the session.
        InvalidRequest, InvalidImage: it refused what the session's creator asked for.
        RunnerProtocolError: it is no answer to that.
    """
    match answer:
        case protocol.HelloReply(shell="", version=version) if version in _VERSIONS:
            raise SandboxError("the daemon stopped before the session was set up")
        case protocol.HelloReply(version=version) if version in _VERSIONS:
            return answer
        case protocol.HelloReply():
            raise SandboxError(f"the sandbox's init speaks protocol {answer.version}")
        case protocol.Error():
            raise _refused(answer)
        case _:
            raise RunnerProtocolError(f"{type(answer).__name__} to the first request")


def _refused(error: protocol.Error) -> SandkastenError:
    """Return what it means to the creator that PID 1 refused that."""
    match error.code:
        case "NO_SUCH_USER":
            return InvalidRequest(error.message, user="can't be used")
        case "BAD_REQUEST":
            return InvalidRequest(error.message, env="can't be set")
        case "INVALID_PATH":
            return InvalidRequest(error.message, filesystem="can't be kept here")
        case "NO_SHELL":
            return InvalidImage(error.message)
        case _:
            return SandboxError(f"the sandbox could not start: {error.message}")


def _listed(paths: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if paths is None else tuple(paths)


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


class Marks:
    """Phases of a create and how long each took, in milliseconds."""

    def __init__(self) -> None:
        self._last = trio.current_time()
        self.phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = trio.current_time()
        self.phases[phase] = round((now - self._last) * 1000, 3)
        self._last = now

    def mark_steps(self, phase: str, steps_us: Mapping[str, int]) -> None:
        """End a phase of which the steps are known: they follow it as `phase.step`, and overlap where they may."""
        self.mark(phase)
        self.phases |= {f"{phase}.{step}": took_us / 1000 for step, took_us in steps_us.items()}
