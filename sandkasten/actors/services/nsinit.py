"""The nsinit client: owner of the one connection to the privileged process.

`Call` carries one request of `nsinit.wire.protocol` to nsinit and brings back its answer, so a new privileged
operation needs a protocol class, its handler in nsinit and its caller, and nothing here. How a connection is made is
the matter of `links/processes.py`.

The client forwards nsinit's log and ends when nsinit dies; its supervisor starts both again, and running sandboxes
don't notice. An nsinit that leaves a request unanswered for 30 s is killed, which fails every request in flight with
`NsinitLost`. Descriptors that come with an answer belong to the asker; those of an asker that was cancelled are closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, assert_never

import attrs
import trio

from nsinit.wire import protocol
from sandkasten.actors.core import Actor, Ask, R, Ref
from sandkasten.errors import ActorGone, BuildFailed, BuildInterrupted, NsinitLost
from sandkasten.images.layers import refusal_of
from sandkasten.links.fds import OwnedFd, wait_ended
from sandkasten.links.nsinit import NsinitAnswer, NsinitLink, failure_text, is_passing
from sandkasten.links.processes import ChildProcess, StartNsinit, forward_log, start_as_child

P = ParamSpec("P")

log = logging.getLogger(__name__)

_REQUEST_S = 30.0
"""Longer than what nsinit does for a session; a request that takes this long means that nsinit hangs."""
_UNPACK_S = 2 * 3600.0
"""Longer than an archive may take, in processor time, and its way to the disk."""

_RECENT_KILL_S = 10.0
"""Age beyond which a kill for memory is not the one that is asked about."""

_STOP_S = 10.0
_LAST_WORDS_S = 1.0
"""Time for reading the rest of nsinit's log after its end."""

_AFTER_ALL_IDS = "g"
"""Sorts behind every session id."""

_SANDBOX_FDS = 2
"""Descriptors of a sandbox that tells of kills for memory: PID 1's, and that of the event."""

_UNSENT = 0
"""`seq` of a request until the client sends it."""


# Messages -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Call(Ask[R]):
    """One request to nsinit; answers what `read` makes of nsinit's answer.

    Raises:
        BuildFailed: nsinit answered `Failed`.
        BuildInterrupted: the same, but only because a process of nsinit died or was slow; `is_retriable` requests only.
        NsinitLost: nsinit died, hangs, or broke the protocol.
    """

    request: protocol.Request[Any]
    read: Callable[[NsinitAnswer], R]
    is_retriable: bool = False
    fds: Sequence[OwnedFd] = ()
    """Descriptors that go along. The asker closes them at the end of its wait, be it by a cancellation; the client
    sends copies of its own."""
    patience_s: float = _REQUEST_S
    """Longer than nsinit takes."""


@attrs.frozen
class Describe(Ask[protocol.Ready]):
    """Ask for nsinit's first message: cgroup mode, directories, kernel features."""


Message = Call[Any] | Describe


@attrs.frozen
class Sandbox:
    """A running sandbox. The receiver owns the descriptors."""

    identity: protocol.Identity
    pidfd: OwnedFd
    oom_kind: protocol.EventKind
    oom_fd: OwnedFd | None
    timings_us: dict[str, int]
    bridged: bool = False
    """Whether the session has a link into the node's network."""

    def close_unused(self) -> None:
        """Close the descriptors, when nobody is left to receive the sandbox."""
        self.pidfd.close()
        if self.oom_fd is not None:
            self.oom_fd.close()


@attrs.frozen
class RunCgroup:
    """A run cgroup that was made, and a descriptor of it for the sandbox's PID 1 (`membership`: see
    `protocol.RunCgroupMade`). The receiver owns the descriptor, and closes it once it was sent."""

    name: str
    membership: Literal["clone", "join"]
    fd: OwnedFd

    def close_unused(self) -> None:
        """Close the descriptor, when nobody is left to receive the handle. The cgroup stays."""
        self.fd.close()


@attrs.frozen
class NetworkSockets:
    """Sockets in a session's network namespace. The receiver owns the descriptors."""

    fds: Sequence[OwnedFd]

    def close_unused(self) -> None:
        """Close the descriptors, when nobody is left to receive them."""
        for fd in self.fds:
            fd.close()


def call(kind: Callable[Concatenate[int, P], protocol.Request[R]], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
    """Return the message that sends a request of class `kind`, with these fields after `seq`; answers nsinit's answer.

    For requests whose answer brings no descriptor.
    """
    return Call(kind(_UNSENT, *args, **kwargs), _message)


def build(plan: protocol.SandboxPlan) -> Call[Sandbox]:
    """Build a sandbox."""
    return Call(protocol.Build(_UNSENT, plan), _sandbox, is_retriable=True)


def attach(session_id: str) -> Call[Sandbox]:
    """Find a running sandbox again."""
    return Call(protocol.Adopt(_UNSENT, session_id), _sandbox)


def stop_processes(session_id: str, grace_ms: int) -> Call[protocol.Ok]:
    """Tell the processes of a session that it ends, and wait until they have ended, at most so long."""
    return call(protocol.StopProcesses, session_id, grace_ms)


def teardown(session_id: str) -> Call[protocol.TornDown]:
    """Remove everything of a session; remainders are logged."""
    return Call(protocol.Teardown(_UNSENT, session_id), _torn_down)


def set_limits(session_id: str, limits: protocol.Limits) -> Call[protocol.Ok]:
    """Change the limits of a session's cgroup."""
    return Call(protocol.SetLimits(_UNSENT, session_id, limits), _message, is_retriable=True)


def make_run_cgroup(session_id: str, name: str) -> Call[RunCgroup]:
    """Make a run cgroup in a session."""

    def read(answer: NsinitAnswer) -> RunCgroup:
        if len(answer.fds) != 1:
            raise _wrong_descriptors(answer)
        return RunCgroup(name, answer.message.membership, answer.fds[0])

    return Call(protocol.MakeRunCgroup(_UNSENT, session_id, name), read, is_retriable=True)


def open_network(session_id: str, *, steers: bool) -> Call[NetworkSockets]:
    """Open a session's way out: a listener, a socket for DNS and, if the kernel steers, the link that leads to both."""
    return _opening(protocol.OpenNetwork(_UNSENT, session_id, steers), protocol.FDS_OF_WAY_OUT - (not steers))


def open_sockets(session_id: str, count: int) -> Call[NetworkSockets]:
    """Make unconnected TCP sockets in a session's network."""
    return _opening(protocol.OpenSockets(_UNSENT, session_id, count), count)


def _opening(request: protocol.OpenNetwork | protocol.OpenSockets, count: int) -> Call[NetworkSockets]:
    def read(answer: NsinitAnswer) -> NetworkSockets:
        if len(answer.fds) != count:
            raise _wrong_descriptors(answer)
        return NetworkSockets(answer.fds)

    return Call(request, read, is_retriable=True)


def ping() -> Call[protocol.Scanned]:
    """Ask for something that costs nothing."""
    return call(protocol.Scan, _AFTER_ALL_IDS)


def _message(answer: NsinitAnswer) -> Any:  # the class that the request names
    _close(answer)
    return answer.message


def _torn_down(answer: NsinitAnswer) -> protocol.TornDown:
    found: protocol.TornDown = _message(answer)
    if found.leftovers:
        log.error("teardown_leftovers", extra={"session_id": found.session_id, "leftovers": found.leftovers})
    return found


def _sandbox(answer: NsinitAnswer) -> Sandbox:
    found: protocol.Built | protocol.Adopted = answer.message
    if not answer.fds or (found.oom_event != "none") is not (len(answer.fds) == _SANDBOX_FDS):
        raise _wrong_descriptors(answer)
    timings = found.timings_us if isinstance(found, protocol.Built) else {}
    oom_fd = answer.fds[1] if len(answer.fds) > 1 else None
    bridged = isinstance(found, protocol.Adopted) and found.bridged
    return Sandbox(found.identity, answer.fds[0], found.oom_event, oom_fd, timings, bridged)


def _wrong_descriptors(answer: NsinitAnswer) -> NsinitLost:
    _close(answer)
    return NsinitLost("the fork server sent the wrong descriptors")


# Asking -------------------------------------------------------------------------------------------------------------


async def ask_when_up(nsinit: Ref, message: Ask[R]) -> R:
    """Wait for an nsinit that is being restarted, then ask once; for requests that may not be repeated."""
    await nsinit.ask_again(Describe())
    return await nsinit.ask(message)


async def ask_patiently(nsinit: Ref, message: Ask[R]) -> R:
    """Ask, and ask again while nsinit is being restarted; only for requests that may be repeated."""
    return await nsinit.ask_again(message, on=(NsinitLost,))


async def scan(nsinit: Ref) -> Sequence[protocol.Found]:
    """Return every session that the kernel or the disk knows of."""
    found: list[protocol.Found] = []
    while True:
        page = await ask_patiently(nsinit, call(protocol.Scan, found[-1].session_id if found else ""))
        found += page.sessions
        if not page.more or not page.sessions:
            return found


async def ask_store(nsinit: Ref, request: protocol.Request[R], fds: Sequence[int] = ()) -> R:
    """Ask about layers and images. `fds` stay the caller's; a caller that is cancelled ends an unpacking by closing the
    other end of its pipe.

    Raises:
        SandkastenError: what `layers.refusal_of` makes of nsinit's failure.
        NsinitLost: nsinit died.
    """
    try:
        with contextlib.ExitStack() as stack:
            owned = [stack.enter_context(OwnedFd(os.dup(fd))) for fd in fds]
            return await ask_when_up(nsinit, Call(request, _message, fds=owned, patience_s=_UNPACK_S))
    except BuildFailed as failed:
        message = failed.message.removeprefix(f"{failed.stage} failed: ")
        raise refusal_of(failed.stage, failed.errno, failed.path, message) from failed


class ThreadLink:
    """The daemon's nsinit as a link of `images.layers.Layers`, for a worker thread of the same trio run; with the
    token of that run for any thread."""

    def __init__(self, nsinit: Ref, token: trio.lowlevel.TrioToken | None = None) -> None:
        self._nsinit, self._token = nsinit, token

    def ask(self, request: protocol.Request[R], fds: Sequence[int] = ()) -> R:
        """See `images.layers.StoreLink`."""
        return trio.from_thread.run(ask_store, self._nsinit, request, fds, trio_token=self._token)


async def list_workspaces(nsinit: Ref) -> Sequence[str]:
    """Return the ids of the workspaces that have a directory."""
    names: list[str] = []
    while True:
        page = await ask_patiently(nsinit, call(protocol.ListWorkspaces, names[-1] if names else ""))
        names += page.names
        if not page.more or not page.names:
            return names


def recent_name(kills: protocol.OomKills) -> str | None:
    """Return the name of a process that the kernel killed for memory just now; None when that can't be known."""
    return kills.name if kills.name and kills.age_s < _RECENT_KILL_S else None


# The actor ----------------------------------------------------------------------------------------------------------


_NO_IO_LIMITS = protocol.IoLimits()


class NsinitClient(Actor):
    """See the module's docstring."""

    def __init__(
        self,
        ref: Ref,
        data_dir: Path,
        node_id: str,
        *,
        disk: protocol.DiskSpec = "auto",
        io: protocol.IoLimits = _NO_IO_LIMITS,
        terminals: int = protocol.MAX_TERMINALS,
        profiles: Sequence[protocol.SeccompProfile] = (),
        crash_at: str = "",
        own_filters: bool = True,
        merge_pages: bool = False,
        bridge: protocol.BridgeTerms | None = None,
        disk_floor_bytes: int = 0,
        start_nsinit: StartNsinit = start_as_child,
    ) -> None:
        super().__init__(ref)
        self._data_dir, self._node_id, self._disk, self._io = data_dir, node_id, disk, io
        self._profiles, self._terminals, self._disk_floor_bytes = tuple(profiles), terminals, disk_floor_bytes
        self._start_nsinit, self._crash_at, self._own_filters = start_nsinit, crash_at, own_filters
        self._merge_pages, self._bridge = merge_pages, bridge
        self._process: ChildProcess | None = None

    async def on_start(self) -> None:
        self._process = await self._start_nsinit()
        self._link = NsinitLink(self._process.sock)
        if self._process.log is not None:  # a service apart has its own
            self._nursery.start_soon(forward_log, self._process.log.fileno())
        self._nursery.start_soon(self._link.serve)
        self._nursery.start_soon(self._watch_end)
        start = protocol.Start(
            self._link.next_seq(),
            str(self._data_dir),
            self._node_id,
            disk=self._disk,
            io=self._io,
            terminals=self._terminals,
            seccomp_profiles=self._profiles,
            crash_at=self._crash_at,
            own_filters=self._own_filters,
            merge_pages=self._merge_pages,
            disk_floor_bytes=self._disk_floor_bytes,
            bridge=self._bridge,
        )
        self._ready: protocol.Ready = _checked(start, await self._request(start)).message
        log.info("nsinit_ready", extra=describe(self._ready))
        if self._ready.disk == "none":
            log.warning("disk_unlimited", extra={"reasons": self._ready.disk_refused})
        if self._merge_pages and not self._ready.features.get("merge_pages"):
            reason = "this kernel has no CONFIG_KSM, or root's configuration, which nsinit goes by, does not allow it"
            log.warning("pages_not_merged", extra={"reason": reason})

    async def on_stop(self) -> None:
        """Close the socket, which ends nsinit, and wait for it; kill it when it takes too long."""
        if self._process is None:
            return
        try:
            await self._process.end("nsinit", _STOP_S)
        finally:
            log.info("nsinit_ended")

    def handle_at_once(self, message: Message) -> Any:
        match message:
            case Describe():
                return self._ready
            case Call():
                return self.defer(self._call, message)
            case _:
                assert_never(message)

    async def _call(self, message: Call[R]) -> R:
        request = _numbered(message.request, self._link.next_seq())
        try:
            with _copied(message.fds) as fds:
                return message.read(_checked(request, await self._request(request, fds, message.patience_s)))
        except BuildFailed as failed:
            if message.is_retriable and is_passing(failed.stage, failed.errno):
                raise BuildInterrupted("a process that makes sandboxes died or was too slow") from failed
            raise

    async def _request(
        self, request: protocol.Request[Any], fds: Sequence[int] = (), patience_s: float = _REQUEST_S
    ) -> NsinitAnswer:
        """Send a request; an nsinit that hangs is killed and its askers get `NsinitLost`."""
        assert self._process is not None
        with trio.move_on_after(patience_s) as scope:
            return await self._link.request(request, fds)
        assert scope.cancelled_caught
        log.error("nsinit_hangs", extra={"request": type(request).__name__, "waited_s": patience_s})
        self._process.kill()
        raise NsinitLost("the fork server does not answer")

    async def _watch_end(self) -> None:
        """End the actor when the process ends. The connection alone is no sign: a child that nsinit had just forked
        may hold its other end."""
        assert self._process is not None
        if self._process.pidfd is not None:
            await wait_ended(self._process.pidfd)
            await trio.sleep(_LAST_WORDS_S)
            raise NsinitLost("the fork server has ended")


@contextlib.contextmanager
def _copied(fds: Sequence[OwnedFd]) -> Iterator[Sequence[int]]:
    """Open copies of an asker's descriptors: a number that the asker has closed may be another file's when it is sent.
    Raises `ActorGone`: the asker has left before, or there can be no more descriptors."""
    with contextlib.ExitStack() as stack:
        try:
            copies = [stack.enter_context(OwnedFd(os.dup(fd.fileno()))).fileno() for fd in fds]
        except (ValueError, OSError) as error:
            raise ActorGone(f"the request was not sent: {error}") from error
        yield copies


def describe(ready: protocol.Ready) -> dict[str, object]:
    """Return the facts for the log: how this machine enforces limits."""
    return {"pid": ready.pid, "cgroups": ready.cgroup_mode, "disk": ready.disk}


def _numbered(request: protocol.Request[R], seq: int) -> protocol.Request[R]:
    return dataclasses.replace(request, seq=seq)  # type: ignore[type-var]  # every request is a dataclass with a seq


def _checked(request: protocol.Request[Any], answer: NsinitAnswer) -> NsinitAnswer:
    """Return the answer if it is of the class that the request names; otherwise close what came with it and raise."""
    if isinstance(answer.message, protocol.answer_class(type(request))):
        return answer
    _close(answer)
    if isinstance(answer.message, protocol.Failed):
        failed = answer.message
        # A run cgroup with a process left in it says EBUSY, every day, and the asker handles it.
        is_everyday = failed.errno == errno.EBUSY and isinstance(request, protocol.RemoveRunCgroup)
        level = logging.DEBUG if is_everyday else logging.WARNING
        log.log(level, "nsinit_refused", extra={"failure": failure_text(failed)})
        raise BuildFailed(
            f"{failed.stage} failed: {failed.message}", stage=failed.stage, path=failed.path, errno=failed.errno
        )
    raise NsinitLost(f"the fork server answered with {type(answer.message).__name__}")


def _close(answer: NsinitAnswer) -> None:
    for fd in answer.fds:
        fd.close()
