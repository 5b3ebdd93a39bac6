"""The start of the egress process, which carries the bytes of sessions that have a way out.

It comes as a child of this process, or from the launcher of a daemon that gave root away (`Launcher.start_egress`),
with descriptor 3 as its end of a SOCK_SEQPACKET socket and a log as nsinit has one (`forward_log`). It starts with the
privileges of root and gives them away itself (`egress/confinement.py`), and it ends with its socket. Beside an nsinit
that is a service apart there is nobody who could start one: `StartEgress` is None there.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from nsinit.spawn import spawn_egress
from sandkasten.links.nsinit import Ends, NsinitProcess

EgressProcess: TypeAlias = NsinitProcess
"""The process is watched, killed and reaped as nsinit is."""

StartEgress = Callable[[], Awaitable[EgressProcess]]


async def start_as_child() -> EgressProcess:
    """Start the egress process as a child of this process."""
    with Ends() as ends:
        pid = spawn_egress(ends.their_socket.fileno(), ends.log_write)
        return ends.give(pid, os.pidfd_open(pid))
