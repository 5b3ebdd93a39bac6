"""The birth of a session: what its actor is handed, the first request to PID 1, and how long each phase took.

The first request can be sent early: PID 1 of a pool sandbox has its socket long before it serves. It reads what was
sent while nsinit still mounts the image as soon as it can, and not only when nsinit has told the daemon and the daemon
has come back. A pool sandbox may have died with its nsinit, and the greeting with it; then the sandbox that was made in
its place is greeted as any other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from runner.wire import protocol
from runner.wire.protocol import Hello, HelloReply, Setup
from sandkasten.actors.core import Ref
from sandkasten.actors.runs.persistence import Keep
from sandkasten.actors.services.directory import Shared
from sandkasten.admission.budget import Budget
from sandkasten.admission.plan import Resolved
from sandkasten.config import DiskSettings, Maximum
from sandkasten.errors import (
    InvalidRequest,
    RunnerLost,
    RunnerProtocolError,
    SandboxError,
    SandkastenError,
)
from sandkasten.host.paths import DataPaths
from sandkasten.images.catalog import Image
from sandkasten.links.runner import RunnerLink
from sandkasten.model.network import PreviewSpec
from sandkasten.output.records import Seal

_VERSIONS = range(protocol.OLDEST_VERSION, protocol.PROTOCOL_VERSION + 1)
"""The versions that PID 1 may speak: the runner of a sandbox is as old as the sandbox."""

HAND_OVER_S = 0.1
"""Deadline for PID 1 of an idle member of a pool: one that is slower is not worth waiting for. On a busy machine, where
a create without the pool takes longest, a quarter of all members did not answer within 20 ms. A busy event loop does
not count against PID 1: an answer that is there when the loop comes back is taken (`RunnerConnection.receive`)."""

HELLO_S = 10.0
"""Deadline for PID 1's answer once PID 1 serves."""


_ADOPTIONS = 4
"""Adoptions at a time that nobody waits for. More would not be faster, since each is work for this process, and would
make requests to other sessions wait."""

_MOST_ADOPTIONS = 64
"""Adoptions at a time, those that a request waits for included: nsinit's mailbox is bounded."""


class AdoptionTurns:
    """The turns of sessions that are taken over from an earlier daemon: in the order in which they began to wait, and
    a session that somebody asks for, or a member of a pool, before all others. Before `begin` only these have theirs.
    """

    def __init__(self) -> None:
        self._turns: dict[Ref, trio.Event] = {}
        self._waiting: dict[Ref, None] = {}
        self._called: dict[Ref, None] = {}
        self._running = 0
        self._has_begun = False

    def begin(self) -> None:
        """Take over sessions that nobody asks for as well."""
        self._has_begun = True
        self._start_next()

    def queue(self, ref: Ref, *, is_member: bool) -> None:
        """Put the session at `ref` behind those that wait, and a member of a pool, which the next create may claim,
        before them."""
        self._turns[ref] = trio.Event()
        self._waiting[ref] = None
        if is_member:
            self._called[ref] = None
        ref.note_messages(lambda: self._call(ref))
        self._start_next()

    @asynccontextmanager
    async def turn(self, ref: Ref) -> AsyncIterator[None]:
        """Wait for the turn of a queued session, and have it until the block ends."""
        turn = self._turns[ref]
        try:
            await turn.wait()
            yield
        finally:
            ref.note_messages()
            del self._turns[ref]
            self._called.pop(ref, None)
            self._waiting.pop(ref, None)
            if turn.is_set():
                self._running -= 1
                self._start_next()

    def _call(self, ref: Ref) -> None:
        if ref in self._waiting:
            self._called[ref] = None
            self._start_next()

    def _start_next(self) -> None:
        while self._running < (_MOST_ADOPTIONS if self._called else _ADOPTIONS * self._has_begun) and self._waiting:
            ref = next(iter(self._called or self._waiting))
            self._called.pop(ref, None)
            del self._waiting[ref]
            self._running += 1
            self._turns[ref].set()


@attrs.frozen(kw_only=True)
class Services(Shared):
    """The rest of the tree, as a session needs it. `cgroup_dirs` is `nsinit.wire.protocol.Ready.cgroup_dirs`.
    `expiries` bounds the sessions that are ended at once because their lease ran out: a thousand of them would hold up
    all else. `adoptions` bounds the sessions taken over at once."""

    paths: DataPaths
    boot_id: str
    cgroup_dirs: Mapping[str, str]
    shell_queue_length: int
    max_exec_ids: int
    maximum: Maximum
    graces: protocol.Graces
    run_key: bytes = attrs.field(repr=False)
    disk: DiskSettings
    budget: Budget
    expiries: trio.CapacityLimiter
    adoptions: AdoptionTurns

    def keep(self, session_id: str) -> Keep:
        """Return what the runs of one session need to outlive the daemon."""
        return Keep(
            seal=Seal(self.run_key, session_id),
            retention_s=self.output.retention_s,
            max_exec_ids=self.max_exec_ids,
        )


@attrs.frozen
class Creation:
    """The making of a new sandbox. `is_prepared`: of a pool sandbox. `unused_shell_ms`: see `Setup`. `env` goes to the
    runner and nowhere else."""

    resolved: Resolved
    image: Image
    is_prepared: bool
    unused_shell_ms: int | None
    env: Mapping[str, str] = attrs.field(repr=False)
    publish: Sequence[PreviewSpec] = ()


def first_request(creation: Creation, graces: protocol.Graces) -> protocol.Setup:
    """Return the first request to PID 1 of a new sandbox."""
    options = creation.resolved.options
    rules = options.filesystem
    return protocol.Setup(
        env=dict(creation.env),
        shell=creation.resolved.shell,
        graces=graces,
        user=options.user,
        cwd=creation.resolved.image_dir,
        unused_shell_ms=creation.unused_shell_ms,
        files=None if rules is None else protocol.FileRules(_listed(rules.readable), _listed(rules.writable)),
    )


def accepted(answer: object) -> protocol.HelloReply:
    """Return the answer to the first request.

    Raises:
        SandboxError: PID 1 speaks another version, or was never set up: then nobody was told of the session.
        InvalidRequest: PID 1 refused what the session's creator asked for.
        RunnerProtocolError: the message is no answer to a first request.
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
    """Translate the refusal of the first request into an error of the create."""
    match error.code:
        case "NO_SUCH_USER":
            return InvalidRequest(error.message, user="can't be used")
        case "BAD_REQUEST":
            return InvalidRequest(error.message, env="can't be set")
        case "INVALID_PATH":
            return InvalidRequest(error.message, filesystem="can't be kept here")
        case _:
            return SandboxError(f"the sandbox could not start: {error.message}")


def _listed(paths: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if paths is None else tuple(paths)


async def greet(link: RunnerLink, request: Setup | Hello) -> HelloReply:
    """Send the first request to a PID 1 that serves. Raises `RunnerLost`, or the translated refusal."""
    with trio.move_on_after(HELLO_S) as patience:
        return accepted(await _ask(link, request))
    assert patience.cancelled_caught
    raise _silence()


async def hand_over(link: RunnerLink, env: Mapping[str, str], *, within_s: float = HAND_OVER_S) -> None:
    """Give PID 1 of a pool's member the environment of its session, which also shows that PID 1 serves.

    Raises:
        RunnerLost: PID 1 is gone, or silent for `within_s`.
        RunnerProtocolError: PID 1 can't be trusted.
        InvalidRequest: PID 1 refused the environment.
    """
    async with link.connection() as connection:
        await connection.send_request(protocol.SetEnv(dict(env)))
        answer = await connection.receive_answer(deadline=trio.current_time() + within_s)
    if isinstance(answer, protocol.Error):
        raise _refused(answer)
    if not isinstance(answer, protocol.Done):
        raise RunnerProtocolError(f"{type(answer).__name__} to an environment")


class Greeting:
    """The first request to a sandbox that is being made. Owns the link to PID 1 until `finish` has returned it."""

    def __init__(self, run_dir: Path, request: Setup) -> None:
        self._run_dir, self._request = run_dir, request
        self._link: RunnerLink | None = None
        self._answer: Any = None  # a member of runner.wire.protocol.ANSWERS
        self._early: trio.Event | None = None

    def begin(self, nursery: trio.Nursery) -> None:
        """Send the request now, to a pool sandbox whose image is about to be mounted."""
        self._early = trio.Event()
        nursery.start_soon(self._greet_early, self._early)

    async def finish(self) -> tuple[RunnerLink, HelloReply]:
        """Return the link and the answer of a sandbox that is built; send the request if that was not done, or in vain.
        The link is the caller's. Raises as `greet`."""
        if self._early is not None:
            with trio.move_on_after(HELLO_S) as patience:
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
        """Close the link unless it was returned."""
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


async def _ask(link: RunnerLink, request: Setup | Hello) -> Any:  # a member of runner.wire.protocol.ANSWERS
    async with link.connection() as connection:
        await connection.send_request(request)
        return await connection.receive_answer()


def _silence() -> RunnerLost:
    return RunnerLost("the sandbox's init does not answer")


class PhaseTimer:
    """Times the phases of a create, in milliseconds."""

    def __init__(self) -> None:
        self._last = trio.current_time()
        self.phases: dict[str, float] = {}

    def end_phase(self, phase: str) -> None:
        """End `phase`, which began when the one before it ended."""
        now = trio.current_time()
        self.phases[phase] = round((now - self._last) * 1000, 3)
        self._last = now

    def end_steps(self, phase: str, steps_us: Mapping[str, int]) -> None:
        """End a phase whose steps are known: they follow it as `phase.step`, and overlap where they may."""
        self.end_phase(phase)
        self.phases |= {f"{phase}.{step}": took_us / 1000 for step, took_us in steps_us.items()}
