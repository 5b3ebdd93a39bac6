"""Sandboxes without programs, each with one workspace in it, through which its files are reached without a session.

Belongs to the workspaces actor and runs in its nursery. One for each workspace in use, made when it is first needed,
lent out as a link to its PID 1, and ended some seconds after the last loan; a bounded number. A helper is a sandbox for
nsinit: it has limits, a slot of ids and a system call filter, and one that a dead daemon left behind is an unknown
session and reaped as such. Whatever is wrong in a workspace can only hurt the helper.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVarTuple

import attrs
import trio

from nsinit.wire import protocol
from runner.wire import protocol as runner_protocol
from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import Sandbox, ask_patiently, ask_when_up, build, teardown
from sandkasten.actors.workspaces.records import not_found
from sandkasten.crash import Crash, Point
from sandkasten.host.paths import DataPaths
from sandkasten.links.runner import RunnerLink
from sandkasten.model.errors import BuildFailed, Capacity, RunnerLost, SandboxError, SandkastenError

Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

MAX_HELPERS = 16
IDLE_S = 5.0
_HELLO_S = 10.0
_END_S = 5.0
_MIB = 1024 * 1024
_LIMITS = protocol.Limits(memory_bytes=512 * _MIB, pids=64, cpu_quota_us=100_000)

Key = tuple[str, bool]
"""A workspace's id, and whether its draft is meant."""


class Host(Protocol):
    """The workspaces actor as its helpers see it."""

    def start_task(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None: ...


@attrs.define(eq=False)
class _Helper:
    """`made` is set when `link` is there or `failure` says why not. `users`: loans, and those who wait for one."""

    session_id: str
    made: trio.Event = attrs.field(factory=trio.Event)
    link: RunnerLink | None = None
    sandbox: Sandbox | None = None
    failure: SandkastenError | None = None
    users: int = 0
    loans: int = 0


class Helpers:
    """See the module's docstring."""

    def __init__(
        self,
        host: Host,
        *,
        zygote: Ref,
        directory: SessionDirectory,
        paths: DataPaths,
        new_id: Callable[[], str],
        crash: Crash,
        idle_s: float = IDLE_S,
    ) -> None:
        self._host, self._zygote, self._directory = host, zygote, directory
        self._paths, self._new_id, self._crash, self._idle_s = paths, new_id, crash, idle_s
        self._helpers: dict[Key, _Helper] = {}

    def is_used(self, workspace_id: str) -> bool:
        """Whether files of a workspace are being transferred."""
        return any(helper.users for (each, _), helper in self._helpers.items() if each == workspace_id)

    async def lend(self, key: Key, done: trio.Event) -> RunnerLink:
        """Return a link that may be used until `done`, making the helper if there is none.

        Raises:
            WorkspaceNotFound, Capacity, BuildFailed, RunnerLost.
        """
        helper = self._helpers.get(key)
        if helper is None:
            helper = self._helpers[key] = await self._begin(key)
        helper.users += 1
        try:
            await helper.made.wait()
            if helper.failure is not None:
                raise helper.failure
            assert helper.link is not None
        except BaseException:
            helper.users -= 1
            raise
        self._host.start_task(self._take_back, key, helper, done)
        return helper.link

    async def end(self, workspace_id: str) -> None:
        """End the helpers of a workspace, whatever they do, and return when they are gone."""
        for key in [each for each in self._helpers if each[0] == workspace_id]:
            helper = self._helpers[key]
            await helper.made.wait()
            await self._end(key, helper)

    async def end_all(self) -> None:
        """End all of them, as far as that can be done in time; what is left is reaped by the next daemon."""
        async with trio.open_nursery() as nursery:
            for key, helper in list(self._helpers.items()):
                nursery.start_soon(self._end, key, helper)

    async def _begin(self, key: Key) -> _Helper:
        while len(self._helpers) >= MAX_HELPERS:
            idle = next(((each, helper) for each, helper in self._helpers.items() if not helper.users), None)
            if idle is None:
                raise Capacity("too many workspaces are being read or written without a session", limit=MAX_HELPERS)
            await self._end(*idle)
        helper = self._helpers.get(key)
        if helper is None:
            helper = _Helper(self._new_id())
            self._directory.reserved.add(helper.session_id)
            self._host.start_task(self._make, key, helper)
        return helper

    async def _make(self, key: Key, helper: _Helper) -> None:
        workspace_id, is_draft = key
        plan = protocol.SandboxPlan(
            session_id=helper.session_id,
            image="files",
            image_kind="files",
            limits=_LIMITS,
            workspace_id=workspace_id,
            workspace_draft=is_draft,
        )
        try:
            helper.sandbox = await ask_when_up(self._zygote, build(plan))
            self._crash.passing(Point.FILES_BUILT)
            helper.link = RunnerLink(self._paths.run_dir(helper.session_id))
            await _greet(helper.link)
        except SandkastenError as error:
            helper.failure = _explain(error, workspace_id)
            await self._end(key, helper)
            return
        finally:
            if helper.failure is None and helper.link is None:
                helper.failure = SandboxError("the workspace could not be opened")
            helper.made.set()
        self._host.start_task(self._watch, key, helper)

    async def _watch(self, key: Key, helper: _Helper) -> None:
        """A helper that dies takes its loans along; the next one is another helper's."""
        assert helper.sandbox is not None
        try:
            await trio.lowlevel.wait_readable(helper.sandbox.pidfd.fileno())
        except trio.ClosedResourceError:
            return
        if self._helpers.get(key) is helper:
            log.warning("workspace_helper_died", extra={"workspace_id": key[0], "session_id": helper.session_id})
            await self._end(key, helper)

    async def _take_back(self, key: Key, helper: _Helper, done: trio.Event) -> None:
        try:
            await done.wait()
        finally:
            helper.users -= 1
            helper.loans += 1
        loans = helper.loans
        if not helper.users:
            await trio.sleep(self._idle_s)
            if not helper.users and helper.loans == loans:
                await self._end(key, helper)

    async def _end(self, key: Key, helper: _Helper) -> None:
        """Close and tear down; bounded, and what fails is the reaper's."""
        if self._helpers.get(key) is helper:
            del self._helpers[key]
        if helper.link is not None:
            helper.link.close()
        sandbox, helper.sandbox = helper.sandbox, None
        if sandbox is not None:
            trio.lowlevel.notify_closing(sandbox.pidfd.fileno())
            sandbox.close_unused()
        with trio.move_on_after(_END_S, shield=True):
            try:
                await ask_patiently(self._zygote, teardown(helper.session_id))
                self._crash.passing(Point.FILES_TORN_DOWN)
            except SandkastenError as error:
                log.warning("workspace_helper_left", extra={"session_id": helper.session_id, "error": str(error)})
        self._directory.reserved.discard(helper.session_id)


async def _greet(link: RunnerLink) -> None:
    with trio.move_on_after(_HELLO_S):
        async with link.connection() as connection:
            await connection.send_request(runner_protocol.Hello())
            answer = await connection.receive_answer()
        match answer:
            case runner_protocol.HelloReply(version=runner_protocol.PROTOCOL_VERSION):
                return
            case _:
                raise SandboxError("the workspace's init speaks another protocol")
    raise RunnerLost("the workspace's init does not answer")


def _explain(error: SandkastenError, workspace_id: str) -> SandkastenError:
    """A mount point that is not there is a workspace that is not there."""
    if isinstance(error, BuildFailed) and (error.stage, error.errno) == ("workspace", errno.ENOENT):
        return not_found(workspace_id)
    return error
