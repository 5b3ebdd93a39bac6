"""The sign of life for the service manager's watchdog: given only while the event loop turns, and store, fork server
and sessions answer.

A daemon that lives and can't work is started anew; sandboxes run on, and are adopted. A disk that is full is no reason:
a new start would find it as full.
"""

from __future__ import annotations

import logging

import trio

from sandkasten.host.notify import Notifier
from sandkasten.supervisor import Supervisor

log = logging.getLogger(__name__)

_VITAL = ("store", "zygote", "sessions")


async def keep_beating(supervisor: Supervisor, notifier: Notifier) -> None:
    """Ask and tell for ever; without a watchdog, only be there."""
    if notifier.beat_s is None:
        await trio.sleep_forever()
    while True:
        await _beat(supervisor, notifier)
        await trio.sleep(notifier.beat_s)


async def _beat(supervisor: Supervisor, notifier: Notifier) -> None:
    checks = (await supervisor.readiness()).checks
    ill = {name: checks[name] for name in _VITAL if checks.get(name, "ok") != "ok"}
    if ill:
        log.error("watchdog_not_told", extra={"checks": ill})
        notifier.say("; ".join(f"{name}: {what}" for name, what in ill.items()))
        return
    found = await supervisor.capacity()
    notifier.alive(f"{found.status}, {sum(found.sessions.values())} sessions")
