"""The change of a live session by a patch: all of it, or nothing.

Limits are put into force in the kernel by nsinit, the environment in PID 1, the rest in the record alone. The actor
checks the state of the session and renews the lease. Refusals of nsinit are translated into the caller's terms.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping

import attrs
import trio

from nsinit.wire.protocol import AskDisk, CloseBridge, SetDisk
from runner.wire import protocol
from sandkasten.actors.core import Ref
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.actors.services.broker import find_secrets
from sandkasten.actors.services.egress import CloseWay, OpenWay
from sandkasten.actors.services.nsinit import ask_patiently, call, set_limits
from sandkasten.actors.session.birth import Services
from sandkasten.actors.session.record import LiveRecord
from sandkasten.admission.plan import check_disk_limits, check_limits, check_maximum, keep_fixed, plan_disk, plan_limits
from sandkasten.admission.secrets import check_secret_env
from sandkasten.config import DiskSettings
from sandkasten.errors import (
    BuildFailed,
    BuildInterrupted,
    Capacity,
    Conflict,
    EgressUnavailable,
    InvalidRequest,
    LimitInUse,
    SandkastenError,
    Unavailable,
)
from sandkasten.model import EventType, Limits, Session, SessionPatch
from sandkasten.model.network import Network, NetworkMode

log = logging.getLogger(__name__)

_WAY_OUT_PAUSE_S = 5.0
"""Time until an adopted session asks for its way out again."""


async def change_disk(ref: Ref, session_id: str, *, before: Limits, after: Limits, allowed: DiskSettings) -> None:
    """Put the disk limits of `after` into force, unless they are those of `before`.

    Raises:
        InvalidRequest: more than any session may have, or the disks of this node keep their size.
    """
    if plan_disk(before) == plan_disk(after):
        return
    check_disk_limits(after, allowed)
    try:
        await ref.ask(call(SetDisk, session_id, plan_disk(after)))
    except BuildFailed as error:
        if error.errno == errno.EOPNOTSUPP:
            message = "the disk of a running session keeps its size on this node"
            raise InvalidRequest(message, limits="disk_mb and disk_inodes can't change") from error
        raise


async def read_disk(ref: Ref, session_id: str) -> dict[str, int]:
    """Return the disk fields of a session's statistics; none of them while nsinit can't be asked."""
    try:
        use = await ref.ask(call(AskDisk, session_id))
    except (BuildFailed, Unavailable) as error:
        log.info("disk_not_read", extra={"session_id": session_id, "error": str(error)})
        return {}
    numbers = {
        "disk_bytes": use.used_bytes,
        "disk_limit_bytes": use.limit_bytes,
        "disk_inodes": use.used_inodes,
        "disk_inodes_limit": use.limit_inodes,
    }
    return {name: number for name, number in numbers.items() if number >= 0}


async def change_limits(services: Services, session: Session, wanted: Limits, *, is_undo: bool = False) -> Limits:
    """Put `wanted` into force, all or none, and return the limits that the session has then. The undoing of a change is
    never refused for lack of room on the node.

    Raises:
        LimitInUse: the session uses more memory than that.
        InvalidRequest: out of range, above the operator's maximum, fixed, or refused by the kernel.
        Capacity: the node can't promise so much now.
        BuildFailed: the session has no cgroup any more.
        BuildInterrupted: nsinit is away; the old or the new limits are in force until a repeated request.
    """
    check_limits(wanted)
    limits = keep_fixed(wanted, session.limits)
    check_maximum(limits, services.maximum)
    before = session.limits
    if is_undo:
        services.budget.hold(session.id, limits)
    else:
        services.budget.change(session.id, limits)
    try:
        await _put_into_force(services, session.id, before, limits)
    except BaseException:
        services.budget.hold(session.id, before)
        raise
    return limits


async def _put_into_force(services: Services, session_id: str, before: Limits, limits: Limits) -> None:
    ref = services.nsinit
    await change_disk(ref, session_id, before=before, after=limits, allowed=services.disk)
    refusal = await _set_limits(ref, session_id, limits)
    if refusal is not None:
        await change_disk(ref, session_id, before=limits, after=before, allowed=services.disk)
        raise refusal


async def _set_limits(ref: Ref, session_id: str, limits: Limits) -> SandkastenError | None:
    """Ask nsinit for the limits; return the error if that was refused."""
    try:
        await ref.ask(set_limits(session_id, plan_limits(limits)))
    except BuildFailed as error:
        match error.errno:
            case errno.EBUSY:
                return LimitInUse("the session uses more memory than that", memory_mb=limits.memory_mb)
            case errno.ETIMEDOUT:
                return LimitInUse("the session's memory can't be reclaimed", memory_mb=limits.memory_mb)
            case errno.EINVAL | errno.ERANGE:
                return InvalidRequest("the kernel refuses these limits", limits="not possible on this node")
        return error
    except BuildInterrupted as error:
        return error
    return None


async def change_session(host: SessionServices, own: LiveRecord, patch: SessionPatch, *, services: Services) -> None:
    """Carry out a patch whose times and network were checked.

    Raises:
        Conflict: the network is not at the revision that the patch is for.
        EgressUnavailable, InvalidRule: the network can't be had now.
        SandkastenError: as `change_limits`, or the translated refusal of PID 1.
    """
    session, revision = own.session, own.session.network_revision
    if patch.if_revision not in (None, revision):
        raise Conflict("the network was changed meanwhile", revision=revision)
    network = patch.network
    if patch.secret_env:
        patch = await _with_placeholders(services.broker, session, patch)
    if network is None:
        await _change_rest(host, own, patch, services=services)
        return
    await put_network(services.egress, session.id, network)
    before, after = session.network.variables, network.variables
    if before != after:
        patch = attrs.evolve(patch, env={**dict.fromkeys(before), **after, **(patch.env or {})})
    failure: SandkastenError | None = None
    try:
        await _change_rest(host, own, patch, services=services)
    except SandkastenError as error:
        failure = error
    if failure is not None:
        await _restore_network(services.egress, session)
        raise failure
    own.change(network=network, network_revision=revision + 1)
    host.emit(EventType.NETWORK_CHANGED, mode=network.mode.value, revision=revision + 1)


async def _with_placeholders(broker: Ref, session: Session, patch: SessionPatch) -> SessionPatch:
    """Return a patch whose environment has placeholders of the secrets that it names. Raises `InvalidRequest`, and as
    `FindSecrets`."""
    network = patch.network or session.network
    check_secret_env(patch.secret_env, network)
    placeholders = (await find_secrets(broker, network)).placeholders(session.id, patch.secret_env)
    return attrs.evolve(patch, env={**(patch.env or {}), **placeholders})


async def put_network(egress: Ref, session_id: str, network: Network) -> None:
    """Have a session reach what `network` says, and nothing else. Raises as `OpenWay`."""
    await egress.ask_again(OpenWay(session_id, network) if network.has_way_out else CloseWay(session_id))


async def close_stale_bridge(services: Services, session: Session) -> None:
    """Remove a bridge that an adopted session has, unless that is its mode: the last daemon died over a change. A way
    out that its process serves was ended by the bridge. Raises as `CloseWay`."""
    if session.network.mode is not NetworkMode.BRIDGE:
        await ask_patiently(services.nsinit, call(CloseBridge, session.id))
        await services.egress.ask_again(CloseWay(session.id))


async def open_way(egress: Ref, session: Session, is_built: trio.Event | None = None) -> None:
    """Give a new session the way out that it was made with; without it there is no session. Before its sandbox is built
    it is opened beside the start of PID 1, and again if nsinit did not know of the sandbox yet. Raises as `OpenWay`."""
    if not session.network.has_way_out:
        return
    if is_built is not None and session.network.mode is NetworkMode.BRIDGE:
        await is_built.wait()
    try:
        await put_network(egress, session.id, session.network)
    except SandkastenError:
        if is_built is None or is_built.is_set():
            raise
        await is_built.wait()
        await put_network(egress, session.id, session.network)


async def reopen_way(egress: Ref, own: LiveRecord, scope: trio.CancelScope) -> None:
    """Give an adopted session its way out, when it can be had, unless `scope` is cancelled. A session whose network the
    configuration does not take any more goes on without one."""
    with scope:
        await trio.lowlevel.checkpoint()
        while own.session.network.has_way_out:
            message = OpenWay(own.session.id, own.session.network)
            try:
                await egress.ask_again(message, on=(EgressUnavailable, BuildFailed))
                break
            except SandkastenError as error:
                log.error("way_out_not_restored", extra={"session_id": own.session.id, "error": str(error)})
                if not isinstance(error, Capacity | BuildFailed):  # it will not pass
                    if message.network.mode is NetworkMode.BRIDGE and not isinstance(error, Conflict):
                        await egress.ask_again(CloseWay(own.session.id))  # it may have rules of another configuration
                    break
            await trio.sleep(_WAY_OUT_PAUSE_S)


async def _restore_network(egress: Ref, session: Session) -> None:
    """Undo a change of the network; a way out that can't be what it was is closed."""
    try:
        await put_network(egress, session.id, session.network)
    except SandkastenError as error:
        log.error("network_not_restored", extra={"session_id": session.id, "error": str(error)})
        await egress.ask_again(CloseWay(session.id))


async def _change_rest(host: SessionServices, own: LiveRecord, patch: SessionPatch, *, services: Services) -> None:
    """Change all but the network."""
    before = own.session.limits
    if patch.limits is not None:
        own.change(limits=await change_limits(services, own.session, patch.limits))
    if patch.env is not None:
        refusal = await _change_environment(host, patch.env)
        if refusal is not None:
            if patch.limits is not None:
                own.change(limits=await change_limits(services, own.session, before, is_undo=True))
            raise refusal
    labels = None if patch.labels is None else dict(patch.labels)
    asked = {"labels": labels, "ttl_s": patch.ttl_s, "max_lifetime_s": patch.max_lifetime_s}
    own.change(**{name: value for name, value in asked.items() if value is not None})


async def _change_environment(host: SessionServices, env: Mapping[str, str | None]) -> SandkastenError | None:
    """Ask PID 1 for the environment; return the error if that was refused."""
    try:
        await host.ask_runner(protocol.SetEnv(dict(env)), protocol.Done)
    except SandkastenError as error:
        return error
    return None
