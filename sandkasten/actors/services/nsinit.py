"""The one connection to nsinit: gets one, forwards requests, forwards its log, ends when it dies.

How one is got is `links/nsinit.py`'s matter. Its supervisor starts the next incarnation; running sandboxes
don't notice. An nsinit that does not answer a request in time is killed, which fails every waiting caller with
`ZygoteLost`. Knows nothing of what a request is for.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, assert_never

import trio

from nsinit.wire import protocol
from sandkasten.actors.core import Actor, Ref
from sandkasten.actors.services.nsinit_messages import (
    AskDisk,
    AskQuota,
    Attach,
    Build,
    DiscardWorkspace,
    FindKills,
    FindVictim,
    Furnish,
    GroupHandle,
    GrowWorkspace,
    ListWorkspaces,
    MakeGroup,
    MakeWorkspace,
    Message,
    Node,
    Ping,
    Prepare,
    PublishWorkspace,
    RemoveGroup,
    RemoveStray,
    Sandbox,
    Scan,
    SetDisk,
    SetFrozen,
    SetLimits,
    Survey,
    SyncWorkspace,
    Teardown,
    workspace_request,
)
from sandkasten.links.nsinit import (
    Answer,
    NsinitProcess,
    StartNsinit,
    ZygoteLink,
    failure_text,
    forward_log,
    is_passing,
    start_as_child,
)
from sandkasten.model.errors import BuildFailed, BuildInterrupted, ZygoteLost
from sandkasten.model.workspace import WorkspaceQuota

log = logging.getLogger(__name__)

_REQUEST_S = 30.0
"""Longer than anything nsinit does; a request that takes this long means that nsinit hangs."""

_VICTIM_AGE_S = 10.0
"""A kill that is older was another one than that which is asked about."""

_STOP_S = 10.0
_LAST_WORDS_S = 1.0
"""What nsinit said before it ended is read within this time."""

_AFTER_ALL_IDS = "g"
"""Sorts behind every session id."""


class Zygote(Actor):
    """See the module's docstring."""

    def __init__(
        self,
        ref: Ref,
        data_dir: Path,
        node_id: str,
        *,
        disk: protocol.DiskWish = "auto",
        profiles: Sequence[protocol.SeccompProfile] = (),
        crash_at: str = "",
        start_nsinit: StartNsinit = start_as_child,
    ) -> None:
        super().__init__(ref)
        self._data_dir, self._node_id, self._disk, self._profiles = data_dir, node_id, disk, tuple(profiles)
        self._start_nsinit, self._crash_at = start_nsinit, crash_at
        self._process: NsinitProcess | None = None

    async def on_start(self) -> None:
        self._process = await self._start_nsinit()
        self._link = ZygoteLink(self._process.sock)
        if self._process.log is not None:  # a service apart has its own
            self._nursery.start_soon(forward_log, self._process.log.fileno())
        self._nursery.start_soon(self._link.serve)
        self._nursery.start_soon(self._watch_end)
        start = protocol.Start(
            self._link.next_seq(),
            str(self._data_dir),
            self._node_id,
            disk=self._disk,
            seccomp_profiles=self._profiles,
            crash_at=self._crash_at,
        )
        answer = await self._request(start)
        self._ready: protocol.Ready = _expect(answer, protocol.Ready).message
        log.info("zygote_ready", extra=describe(self._ready))
        if self._ready.disk == "none":
            log.warning("disk_unlimited", extra={"reasons": self._ready.disk_refused})

    async def on_stop(self) -> None:
        """Close the socket, which ends nsinit, and wait for it; kill it when it takes too long."""
        if self._process is None:
            return
        self._process.sock.close()
        try:
            if not await self._has_ended():
                log.error("zygote_killed", extra={"waited_s": _STOP_S})
                self._process.kill()
                await self._has_ended()
        finally:
            self._process.reap()
            log.info("zygote_ended")
            self._process.close()

    async def _has_ended(self) -> bool:
        """Wait for nsinit's end, but not for ever; one that a service apart looks after is not waited for."""
        assert self._process is not None
        if self._process.pidfd is None:
            return True
        with trio.move_on_after(_STOP_S) as scope:
            await trio.lowlevel.wait_readable(self._process.pidfd.fileno())
        return not scope.cancelled_caught

    async def handle(self, message: Message) -> Any:
        match message:
            case Node():
                return self._ready
            case Ping():
                return self.defer(self._ping)
            case Prepare(session_id, limits, disk):
                return self.defer(self._ok, protocol.Prepare(self._link.next_seq(), session_id, limits, disk))
            case Furnish(plan):
                return self.defer(self._ok, protocol.Furnish(self._link.next_seq(), plan))
            case Build(plan):
                return self.defer(self._build, plan)
            case Attach(session_id):
                return self.defer(self._sandbox, protocol.Attach(self._link.next_seq(), session_id))
            case Teardown(session_id):
                return self.defer(self._teardown, session_id)
            case Scan():
                return self.defer(self._scan)
            case Survey():
                return self.defer(self._survey)
            case RemoveStray(stray):
                return self.defer(self._ok, protocol.RemoveLeftover(self._link.next_seq(), stray))
            case SetLimits(session_id, limits):
                return self.defer(self._set_limits, session_id, limits)
            case SetFrozen(session_id, frozen):
                return self.defer(self._ok, protocol.SetFrozen(self._link.next_seq(), session_id, frozen))
            case SetDisk(session_id, disk):
                return self.defer(self._ok, protocol.SetDisk(self._link.next_seq(), session_id, disk))
            case AskDisk(session_id):
                return self.defer(self._ask_disk, session_id)
            case MakeWorkspace() | GrowWorkspace() | DiscardWorkspace() | PublishWorkspace() | SyncWorkspace():
                return self.defer(self._ok, workspace_request(message, self._link.next_seq()))
            case ListWorkspaces():
                return self.defer(self._list_workspaces)
            case AskQuota(workspace_id):
                return self.defer(self._ask_quota, workspace_id)
            case MakeGroup(session_id, name):
                return self.defer(self._make_group, session_id, name)
            case RemoveGroup():
                return self.defer(self._remove_group, message)
            case FindVictim(session_id):
                return self.defer(self._find_victim, session_id)
            case FindKills(session_id):
                return self.defer(self._find_kills, session_id)
            case _:
                assert_never(message)

    async def _request(self, message: Any) -> Answer:  # a member of nsinit.protocol.REQUESTS
        """Send a request; an nsinit that hangs is killed and its askers get `ZygoteLost`."""
        assert self._process is not None
        with trio.move_on_after(_REQUEST_S) as scope:
            return await self._link.request(message)
        assert scope.cancelled_caught
        log.error("zygote_hangs", extra={"request": type(message).__name__, "waited_s": _REQUEST_S})
        self._process.kill()
        raise ZygoteLost("the fork server does not answer")

    async def _ok(self, message: Any) -> None:
        _expect(await self._request(message), protocol.Ok)

    async def _ask_disk(self, session_id: str) -> protocol.DiskUse:
        request = protocol.AskDisk(self._link.next_seq(), session_id)
        use: protocol.DiskUse = _expect(await self._request(request), protocol.DiskUse).message
        return use

    async def _ping(self) -> None:
        _expect(await self._request(protocol.Scan(self._link.next_seq(), _AFTER_ALL_IDS)), protocol.Scanned)

    async def _scan(self) -> Sequence[protocol.Found]:
        found: list[protocol.Found] = []
        while True:
            after = found[-1].session_id if found else ""
            request = protocol.Scan(self._link.next_seq(), after)
            scanned = _expect(await self._request(request), protocol.Scanned).message
            found += scanned.sessions
            if not scanned.more or not scanned.sessions:
                return found

    async def _survey(self) -> Sequence[protocol.Leftover]:
        answer = _expect(await self._request(protocol.FindLeftovers(self._link.next_seq())), protocol.LeftoversFound)
        strays: Sequence[protocol.Leftover] = answer.message.leftovers
        return strays

    async def _list_workspaces(self) -> Sequence[str]:
        names: list[str] = []
        while True:
            request = protocol.ListWorkspaces(self._link.next_seq(), names[-1] if names else "")
            listed = _expect(await self._request(request), protocol.WorkspacesListed).message
            names += listed.names
            if not listed.more or not listed.names:
                return names

    async def _ask_quota(self, workspace_id: str) -> WorkspaceQuota | None:
        request = protocol.AskQuota(self._link.next_seq(), workspace_id)
        quota = _expect(await self._request(request), protocol.QuotaFound).message.quota
        return None if quota is None else WorkspaceQuota(quota.size_bytes, quota.inodes)

    async def _teardown(self, session_id: str) -> protocol.TornDown:
        answer = _expect(await self._request(protocol.Teardown(self._link.next_seq(), session_id)), protocol.TornDown)
        torn_down: protocol.TornDown = answer.message
        if torn_down.leftovers:
            log.error("teardown_leftovers", extra={"session_id": session_id, "leftovers": torn_down.leftovers})
        return torn_down

    async def _build(self, plan: protocol.SandboxPlan) -> Sandbox:
        with _interruptions():
            return await self._sandbox(protocol.Build(self._link.next_seq(), plan))

    async def _set_limits(self, session_id: str, limits: protocol.Limits) -> None:
        with _interruptions():
            await self._ok(protocol.SetLimits(self._link.next_seq(), session_id, limits))

    async def _sandbox(self, message: protocol.Build | protocol.Attach) -> Sandbox:
        answer = _expect(await self._request(message), protocol.Built, protocol.Attached)
        found = answer.message
        if not answer.fds or (found.oom_event != "none") is not (len(answer.fds) == protocol.MAX_FDS):
            _close(answer)
            raise ZygoteLost("the fork server sent the wrong descriptors")
        timings = found.timings_us if isinstance(found, protocol.Built) else {}
        oom_fd = answer.fds[1] if len(answer.fds) > 1 else None
        return Sandbox(found.identity, answer.fds[0], found.oom_event, oom_fd, timings)

    async def _make_group(self, session_id: str, name: str) -> GroupHandle:
        request = protocol.MakeGroup(self._link.next_seq(), session_id, name)
        with _interruptions():
            answer = _expect(await self._request(request), protocol.Grouped)
        if len(answer.fds) != 1:
            _close(answer)
            raise ZygoteLost("the fork server sent the wrong descriptors")
        return GroupHandle(name, answer.message.membership, answer.fds[0])

    async def _remove_group(self, group: RemoveGroup) -> None:
        request = protocol.RemoveGroup(self._link.next_seq(), group.session_id, group.name, group.kill)
        answer = await self._request(request)
        match answer.message:
            case protocol.Failed(errno=errno.EBUSY) as failed:  # everyday, so not in the log
                raise BuildFailed(failed.message, stage=failed.stage, path=failed.path, errno=failed.errno)
        _expect(answer, protocol.Ok)

    async def _find_victim(self, session_id: str) -> str | None:
        victim = await self._find_kills(session_id)
        return victim.name if victim.name and victim.age_s < _VICTIM_AGE_S else None

    async def _find_kills(self, session_id: str) -> protocol.Victim:
        request = protocol.FindVictim(self._link.next_seq(), session_id)
        victim: protocol.Victim = _expect(await self._request(request), protocol.Victim).message
        return victim

    async def _watch_end(self) -> None:
        """nsinit's end is that of the connection, unless what it had just forked holds the other end of it."""
        assert self._process is not None
        if self._process.pidfd is not None:
            await trio.lowlevel.wait_readable(self._process.pidfd.fileno())
            await trio.sleep(_LAST_WORDS_S)
            raise ZygoteLost("the fork server has ended")


def describe(ready: protocol.Ready) -> dict[str, object]:
    """Return what is worth a line in the log: how this machine enforces what it enforces."""
    return {"pid": ready.pid, "cgroups": ready.cgroup_mode, "disk": ready.disk}


@contextmanager
def _interruptions() -> Iterator[None]:
    """Tell a failure that nothing asked for has caused from the others."""
    try:
        yield
    except BuildFailed as failed:
        if is_passing(failed.stage, failed.errno):
            raise BuildInterrupted("a process that makes sandboxes died or was too slow") from failed
        raise


def _expect(answer: Answer, *expected: type) -> Answer:
    """Return the answer if it is of an expected class; otherwise close what came with it and raise."""
    if isinstance(answer.message, expected):
        return answer
    _close(answer)
    if isinstance(answer.message, protocol.Failed):
        failed = answer.message
        log.warning("nsinit_refused", extra={"failure": failure_text(failed)})
        raise BuildFailed(
            f"{failed.stage} failed: {failed.message}", stage=failed.stage, path=failed.path, errno=failed.errno
        )
    raise ZygoteLost(f"the fork server answered with {type(answer.message).__name__}")


def _close(answer: Answer) -> None:
    for fd in answer.fds:
        fd.close()
