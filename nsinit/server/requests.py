"""The requests that a started nsinit carries out: one row for each class, and the handlers that the rows name.

A row says how each field of a request is checked, what the request is ordered by (requests of one key run in the order
in which they came, all others side by side), and which handler does the work. A new privileged operation is its class
in `wire/protocol.py`, which names the answer, a row and a handler here, and its caller in the daemon.

A row can't be made with a field that nobody checks: such an nsinit does not start. `Start` and `OpenStore`, which may
only come first, are `server.serve`'s. An nsinit that serves the store alone has the rows of `STORE_TABLE`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, TypeVar

from nsinit.log import log
from nsinit.scheduler import Wait
from nsinit.server import kmsg
from nsinit.server.packing import Packing
from nsinit.server.start import StartedNsinit
from nsinit.server.unpacking import Unpacking
from nsinit.wire import protocol as p
from nsinit.wire.validate import (
    MIN_DISK_INODES,
    InvalidName,
    check_base_layers,
    check_bridge_rules,
    check_bytes,
    check_certificate,
    check_digest,
    check_digests,
    check_disk,
    check_entries,
    check_grace,
    check_image_layers,
    check_image_name,
    check_layer_or_image,
    check_limits,
    check_plan,
    check_run_cgroup_name,
    check_session_id,
    check_socket_count,
    check_stop_grace,
    check_workspace_id,
)

LIST_BATCH = 200
"""Sessions or workspaces in one answer, so that it stays well below `MAX_DATAGRAM_BYTES`."""

R = TypeVar("R", bound=p.Request[Any])
Answer = tuple[object, list[int]]
"""A message and the descriptors that go with it, which are closed when it was sent."""
Work = Generator[Wait, bool, Answer]
Check = Callable[[Any], None]
"""Raises `InvalidName` unless the value of a field is acceptable."""


@dataclass(frozen=True, slots=True)
class Row(Generic[R]):
    """The way one class of requests is carried out. Its answer is of the class that the request's class names.

    `checks`: from field to check; they run before any work. `key`: returns what the request is ordered by; None, or
    one that returns None: it waits for no other. `joins`: tells whether it goes on beside the one of its key that is
    under way. `work`: a job, or a plain function where nothing is waited for.
    `on_arrival`: called at once, before earlier requests of the same key are done. `fds`: the number of descriptors
    that come along, which `work` is called with, too; they are closed after it.
    """

    request: type[R]
    checks: Mapping[str, Check]
    key: Callable[[R], str | None] | None
    work: Callable[..., Work] | Callable[..., Answer]
    on_arrival: Callable[[Any, R], None] | None = None
    joins: Callable[[Any, R], bool] | None = None
    fds: int = 0

    def __post_init__(self) -> None:
        """Raise `TypeError` unless every field that is more than a switch has a check."""
        named = {each.name for each in fields(self.request) if each.type != "bool"} - {"seq"}  # type: ignore[arg-type]
        if named != set(self.checks):
            raise TypeError(f"{self.request.__name__}: fields {sorted(named)}, checks {sorted(self.checks)}")

    @property
    def answer(self) -> type:
        """The class of the answer, in place of which `Failed` may come."""
        answer: type = p.answer_class(self.request)
        return answer

    def check(self, request: R, fds: Sequence[int] = ()) -> None:
        """Raise `InvalidName` unless every field is acceptable, and as many descriptors came as belong to it."""
        if len(fds) != self.fds:
            raise InvalidName(f"{len(fds)} descriptors came along, not {self.fds}")
        for name, check in self.checks.items():
            check(getattr(request, name))

    def run(self, node: StoreNode, request: R, fds: Sequence[int] = ()) -> Work:
        """Do the work of a request that was checked, and close its descriptors. Raises `StepFailed`, `OSError`."""
        try:
            done = self.work(node, request, list(fds)) if self.fds else self.work(node, request)
            message, sent_fds = done if isinstance(done, tuple) else (yield from done)
        finally:
            for fd in fds:
                os.close(fd)
        assert isinstance(message, (self.answer, p.Failed))
        return message, sent_fds


# Sandboxes --------------------------------------------------------------------------------------------------------


def prepare(node: StartedNsinit, request: p.Prepare) -> Work:
    yield from node.sessions.prepare(request.session_id, request.limits, request.disk)
    return p.Ok(request.seq), []


def mount_image(node: StartedNsinit, request: p.MountImage) -> Work:
    yield from node.sessions.mount_image(request.plan)
    return p.Ok(request.seq), []


def build(node: StartedNsinit, request: p.Build) -> Work:
    built, fds = yield from node.sessions.build(request)
    log("info", "built", built.session_id, pid=built.identity.pid)
    return built, fds


def attach(node: StartedNsinit, request: p.Adopt) -> Answer:
    attached, fds = node.sessions.attach(request.session_id)
    return replace(attached, seq=request.seq), fds


def stop_processes(node: StartedNsinit, request: p.StopProcesses) -> Work:
    left = yield from node.sessions.stop_processes(request.session_id, request.grace_ms / 1000)
    log("info", "told to end", request.session_id, left=left)
    return p.Ok(request.seq), []


def abort_work(node: StartedNsinit, request: p.Teardown) -> None:
    """A teardown waits for a build of that session, which has to fail now, as a packing of it has."""
    node.sessions.abort_build(request.session_id)
    node.packing.session_jails.end(request.session_id)


def end_packing(node: StartedNsinit, request: p.SetFrozen | p.StopProcesses) -> None:
    """A session that goes on, if only to end, is not packed any more."""
    if isinstance(request, p.StopProcesses) or not request.frozen:
        node.packing.session_jails.end(request.session_id)


def tear_down(node: StartedNsinit, request: p.Teardown) -> Work:
    removed = yield from node.sessions.remove(request.session_id)
    counters = removed.counters
    log("info", "torn down", request.session_id, leftovers=list(removed.leftovers))
    return p.TornDown(
        *(request.seq, request.session_id, counters.oom_kills, counters.cpu_usec, counters.memory_peak_bytes),
        removed.leftovers,
    ), []


def scan(node: StartedNsinit, request: p.Scan) -> Answer:
    found, more = node.sessions.scan(request.after, LIST_BATCH)
    return p.Scanned(request.seq, tuple(found), more), []


# A running session ------------------------------------------------------------------------------------------------


def set_limits(node: StartedNsinit, request: p.SetLimits) -> Work:
    yield from node.sessions.set_limits(request.session_id, request.limits)
    return p.Ok(request.seq), []


def set_frozen(node: StartedNsinit, request: p.SetFrozen) -> Work:
    yield from node.sessions.set_frozen(request.session_id, frozen=request.frozen)
    return p.Ok(request.seq), []


def set_disk(node: StartedNsinit, request: p.SetDisk) -> Answer:
    node.sessions.set_disk(request.session_id, request.disk)
    return p.Ok(request.seq), []


def ask_disk(node: StartedNsinit, request: p.AskDisk) -> Answer:
    return p.DiskUse(request.seq, *node.sessions.disk_usage(request.session_id)), []


def make_run_cgroup(node: StartedNsinit, request: p.MakeRunCgroup) -> Work:
    membership, fd = yield from node.sessions.make_run_cgroup(request.session_id, request.name)
    return p.RunCgroupMade(request.seq, membership), [fd]


def remove_run_cgroup(node: StartedNsinit, request: p.RemoveRunCgroup) -> Work:
    if (yield from node.sessions.remove_run_cgroup(request.session_id, request.name, kill=request.kill)):
        return p.Ok(request.seq), []
    return p.Failed(request.seq, "group", request.name, errno.EBUSY, "a process in the run cgroup lives on"), []


def join_build(node: StartedNsinit, request: p.OpenNetwork) -> bool:
    """Have a way out opened beside a build that is under way, whose end waits for it; tell whether there is one."""
    filling = node.sessions.filling.get(request.session_id)
    if filling is not None:
        filling.join()
    return filling is not None


def open_network(node: StartedNsinit, request: p.OpenNetwork) -> Work:
    fds = yield from node.sessions.open_network(request.session_id, steers=request.steers)
    return p.NetworkOpened(request.seq, request.session_id), fds


def open_bridge(node: StartedNsinit, request: p.OpenBridge) -> Work:
    link = yield from node.sessions.open_bridge(request)
    return p.BridgeOpened(request.seq, request.session_id, link), []


def close_bridge(node: StartedNsinit, request: p.CloseBridge) -> Work:
    yield from node.sessions.close_bridge(request.session_id)
    return p.Ok(request.seq), []


def trust_authority(node: StartedNsinit, request: p.TrustAuthority) -> Answer:
    node.sessions.trust(request.session_id, request.certificate)
    return p.Ok(request.seq), []


def open_sockets(node: StartedNsinit, request: p.OpenSockets) -> Work:
    fds = yield from node.sessions.open_sockets(request.session_id, request.count)
    return p.SocketsOpened(request.seq, request.session_id), fds


def find_oom_kills(node: StartedNsinit, request: p.FindOomKills) -> Work:
    kills = yield from node.sessions.find_oom_kills(request.session_id)
    if not kills.last:
        return p.OomKills(request.seq, ""), []
    newest = kills.last[-1]
    # In a container the log's pids are the machine's, and mean other processes here.
    count, pids = (kills.count, kills.pids) if node.kernel_log.has_our_pids else (0, ())
    return p.OomKills(request.seq, newest.name, kmsg.age_s(newest), count, pids), []


def pack_session(node: StartedNsinit, request: p.PackSession, fds: list[int]) -> Work:
    births = node.sessions.births
    packed = yield from node.packing.pack_session(request, fds, births.tree, births.machine.features)
    log("info", "packed", request.session_id, entries=packed.entries, digest=packed.digest)
    return packed, []


# Workspaces -------------------------------------------------------------------------------------------------------


def make_workspace(node: StartedNsinit, request: p.MakeWorkspace) -> Work:
    yield from node.workspaces.make(request)
    return p.Ok(request.seq), []


def grow_workspace(node: StartedNsinit, request: p.GrowWorkspace) -> Work:
    yield from node.workspaces.grow(request)
    return p.Ok(request.seq), []


def publish_workspace(node: StartedNsinit, request: p.PublishWorkspace) -> Work:
    yield from node.workspaces.publish(request)
    node.sessions.delete_trash()
    return p.Ok(request.seq), []


def sync_workspace(node: StartedNsinit, request: p.SyncWorkspace) -> Work:
    yield from node.workspaces.sync(request)
    return p.Ok(request.seq), []


def discard_workspace(node: StartedNsinit, request: p.DiscardWorkspace) -> Work:
    yield from node.workspaces.discard(request)
    node.sessions.delete_trash()
    return p.Ok(request.seq), []


def ask_quota(node: StartedNsinit, request: p.AskQuota) -> Answer:
    return p.QuotaFound(request.seq, node.workspaces.volumes.quota_of(request.workspace_id)), []


def list_workspaces(node: StartedNsinit, request: p.ListWorkspaces) -> Answer:
    names, more = node.workspaces.listed(request.after, LIST_BATCH)
    return p.WorkspacesListed(request.seq, names, more), []


# Leftovers --------------------------------------------------------------------------------------------------------


def find_leftovers(node: StartedNsinit, request: p.FindLeftovers) -> Work:
    return p.LeftoversFound(request.seq, tuple((yield from node.leftovers.find()))), []


def remove_leftover(node: StartedNsinit, request: p.RemoveLeftover) -> Work:
    is_gone = yield from node.leftovers.remove(request.leftover)
    node.sessions.delete_trash()
    if is_gone:
        log("warning", "leftover removed", kind=request.leftover.kind, name=request.leftover.name)
        return p.Ok(request.seq), []
    return p.Failed(request.seq, "leftover", request.leftover.name, errno.EBUSY, "something of it is left"), []


# Layers and images ------------------------------------------------------------------------------------------------


class StoreNode(Protocol):
    """An nsinit with layers and images: a started one, or one that serves them alone."""

    @property
    def unpacking(self) -> Unpacking: ...
    @property
    def packing(self) -> Packing: ...


def unpack_layer(node: StoreNode, request: p.UnpackLayer, fds: list[int]) -> Work:
    unpacked = yield from node.unpacking.unpack(request, fds)
    log("info", "unpacked", name=unpacked.digest, entries=unpacked.entries, new=unpacked.is_new)
    return unpacked, []


def pack_layer(node: StoreNode, request: p.PackLayer, fds: list[int]) -> Work:
    packed = yield from node.packing.pack(request, fds)
    log("info", "packed", name=request.name, entries=packed.entries, digest=packed.digest)
    return packed, []


def publish_image(node: StoreNode, request: p.PublishImage, fds: list[int]) -> Work:
    yield from node.unpacking.store.publish(request, fds[0])
    log("info", "published", name=request.name, layers=len(request.layers))
    return p.Ok(request.seq), []


def delete_image(node: StoreNode, request: p.DeleteImage) -> Work:
    yield from node.unpacking.store.delete(request)
    log("info", "image deleted", name=request.name)
    return p.Ok(request.seq), []


def collect_layers(node: StoreNode, request: p.CollectLayers) -> Work:
    return (yield from node.unpacking.store.collect(request)), []


# The table --------------------------------------------------------------------------------------------------------


def _compared(_value: object) -> None:
    """Accept any value: it is only compared with names that are found, and never becomes part of a path."""


def _quota(quota: p.DiskLimits | None) -> None:
    if quota is not None:
        check_disk(quota)


def _size(size_bytes: int) -> None:
    check_disk(p.DiskLimits(size_bytes, MIN_DISK_INODES))


class OfSession(Protocol):
    """A request with a field `session_id`, by which it is ordered."""

    @property
    def session_id(self) -> str: ...


class OfWorkspace(Protocol):
    """A request with a field `workspace_id`, by which it is ordered."""

    @property
    def workspace_id(self) -> str: ...


def _of_session(request: OfSession) -> str:
    return request.session_id


def _of_plan(request: p.MountImage | p.Build) -> str:
    return request.plan.session_id


def _of_layer(request: p.UnpackLayer) -> str | None:
    return f"layer {request.digest}" if request.digest else None


def _of_image(request: p.PublishImage | p.DeleteImage) -> str:
    return f"image {request.name}"


def _of_workspace(request: OfWorkspace) -> str:
    return f"workspace {request.workspace_id}"


_SESSION = {"session_id": check_session_id}
_RUN_CGROUP = {**_SESSION, "name": check_run_cgroup_name}
_WORKSPACE = {"workspace_id": check_workspace_id}
_BRIDGE = {"allow": check_bridge_rules, "deny": check_bridge_rules}
_LIMITS, _DISK, _PLAN, _AFTER = (
    {"limits": check_limits},
    {"disk": check_disk},
    {"plan": check_plan},
    {"after": _compared},
)

_IMAGE: dict[str, Check] = {"name": check_image_name}
_UNPACK: dict[str, Check] = {
    "digest": check_digest,
    "max_bytes": check_bytes,
    "max_entries": check_entries,
    "reserve_bytes": check_bytes,
}
_PACKED: dict[str, Check] = {"max_bytes": check_bytes, "max_entries": check_entries}
_COLLECT: dict[str, Check] = {"grace_s": check_grace, "kept": check_digests, "only": check_digests}

_STORE_ROWS: tuple[Row[Any], ...] = (
    Row(p.UnpackLayer, _UNPACK, _of_layer, unpack_layer, fds=2),
    Row(p.PackLayer, {**_PACKED, "name": check_layer_or_image}, None, pack_layer, fds=2),
    Row(p.PublishImage, {**_IMAGE, "layers": check_image_layers}, _of_image, publish_image, fds=1),
    Row(p.DeleteImage, _IMAGE, _of_image, delete_image),
    Row(p.CollectLayers, _COLLECT, None, collect_layers),
)
_ROWS: tuple[Row[Any], ...] = (
    *_STORE_ROWS,
    # request (which names its answer), checks, ordered by, work
    Row(p.Prepare, {**_SESSION, **_LIMITS, **_DISK}, _of_session, prepare),
    Row(p.MountImage, _PLAN, _of_plan, mount_image),
    Row(p.Build, _PLAN, _of_plan, build),
    Row(p.Adopt, _SESSION, _of_session, attach),
    Row(
        p.StopProcesses,
        {**_SESSION, "grace_ms": check_stop_grace},
        _of_session,
        stop_processes,
        on_arrival=end_packing,
    ),
    Row(p.Teardown, _SESSION, _of_session, tear_down, on_arrival=abort_work),
    Row(p.Scan, _AFTER, None, scan),
    Row(p.SetLimits, {**_SESSION, **_LIMITS}, _of_session, set_limits),
    Row(p.SetFrozen, _SESSION, _of_session, set_frozen, on_arrival=end_packing),
    Row(p.SetDisk, {**_SESSION, **_DISK}, _of_session, set_disk),
    Row(p.AskDisk, _SESSION, None, ask_disk),
    Row(p.MakeRunCgroup, _RUN_CGROUP, _of_session, make_run_cgroup),
    Row(p.RemoveRunCgroup, _RUN_CGROUP, _of_session, remove_run_cgroup),
    Row(p.OpenNetwork, _SESSION, _of_session, open_network, joins=join_build),
    Row(p.OpenBridge, {**_SESSION, **_BRIDGE}, _of_session, open_bridge),
    Row(p.CloseBridge, _SESSION, _of_session, close_bridge),
    Row(p.TrustAuthority, {**_SESSION, "certificate": check_certificate}, _of_session, trust_authority),
    Row(p.OpenSockets, {**_SESSION, "count": check_socket_count}, _of_session, open_sockets),
    Row(p.PackSession, {**_PACKED, **_SESSION, "base_layers": check_base_layers}, None, pack_session, fds=2),
    Row(p.FindOomKills, _SESSION, None, find_oom_kills),
    Row(p.MakeWorkspace, {**_WORKSPACE, "quota": _quota}, _of_workspace, make_workspace),
    Row(p.GrowWorkspace, {**_WORKSPACE, "size_bytes": _size}, _of_workspace, grow_workspace),
    Row(p.PublishWorkspace, _WORKSPACE, _of_workspace, publish_workspace),
    Row(p.SyncWorkspace, _WORKSPACE, _of_workspace, sync_workspace),
    Row(p.DiscardWorkspace, _WORKSPACE, _of_workspace, discard_workspace),
    Row(p.AskQuota, _WORKSPACE, _of_workspace, ask_quota),
    Row(p.ListWorkspaces, _AFTER, None, list_workspaces),
    Row(p.FindLeftovers, {}, None, find_leftovers),
    Row(p.RemoveLeftover, {"leftover": _compared}, None, remove_leftover),
)
TABLE: dict[type, Row[Any]] = {row.request: row for row in _ROWS}
STORE_TABLE: dict[type, Row[Any]] = {row.request: row for row in _STORE_ROWS}
