"""Changes the limits of a running session through nsinit, and says in the caller's terms why that was refused.

Knows no record and no lease: what the session's actor does with the answer is its own.
"""

from __future__ import annotations

import errno

from sandkasten.actors.core import Ref
from sandkasten.actors.services import nsinit_messages as zygote
from sandkasten.actors.session.session_disk import change_disk
from sandkasten.actors.session.setup import Services
from sandkasten.admission.fixed_limits import check_maximum, keep_fixed
from sandkasten.admission.plan import check_limits, plan_limits
from sandkasten.model import Limits, Session
from sandkasten.model.errors import BuildFailed, BuildInterrupted, InvalidRequest, LimitInUse, SandkastenError


async def change_limits(services: Services, session: Session, wanted: Limits, *, is_undo: bool = False) -> Limits:
    """Put `wanted` into force, all or none, and return the limits that the session has then. To undo a change is
    nothing that the node could be too full for.

    Raises:
        LimitInUse: the session uses more memory than that.
        InvalidRequest: out of range, above the operator's maximum, fixed, or not what the kernel takes here.
        Capacity: the node can't promise so much now.
        BuildFailed: the session has no cgroup any more.
        BuildInterrupted: worth another try; until then either limits may be in force.
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
    ref = services.zygote
    await change_disk(ref, session_id, before=before, after=limits, allowed=services.disk)
    refusal = await _set_limits(ref, session_id, limits)
    if refusal is not None:
        await change_disk(ref, session_id, before=limits, after=before, allowed=services.disk)
        raise refusal


async def _set_limits(ref: Ref, session_id: str, limits: Limits) -> SandkastenError | None:
    """Ask nsinit; return why it did not."""
    try:
        await ref.ask(zygote.SetLimits(session_id, plan_limits(limits)))
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
