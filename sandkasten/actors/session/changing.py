"""Changes a live session as a patch says: all of it, or nothing.

Its limits are in force in the kernel, its environment in PID 1, the rest in its record alone. In which state a session
must be for that, and its lease, are its actor's to see to.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.wire import protocol
from sandkasten.actors.runs.host import Host
from sandkasten.actors.session.record import LiveRecord
from sandkasten.actors.session.session_limits import change_limits
from sandkasten.actors.session.setup import Services
from sandkasten.model import SessionPatch
from sandkasten.model.errors import SandkastenError


async def change_session(host: Host, own: LiveRecord, patch: SessionPatch, *, services: Services) -> None:
    """Carry out a patch whose times were checked. Raises as `change_limits`, and what PID 1 refused with."""
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


async def _change_environment(host: Host, env: Mapping[str, str | None]) -> SandkastenError | None:
    """Have PID 1 change it; return why it did not."""
    try:
        await host.ask_runner(protocol.SetEnv(dict(env)), protocol.Done)
    except SandkastenError as error:
        return error
    return None
