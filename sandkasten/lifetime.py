"""How long a session may live, and why it ended: the values, no behaviour. Re-exported by `model.py`."""

from __future__ import annotations

import enum
import math

FOREVER_S = math.inf
"""A time to live or a lifetime without end. JSON and the database say null."""

MAX_SPAN_S = 366 * 86_400.0
"""The longest idle timeout or lifetime that is not without end."""


class EndReason(enum.StrEnum):
    """Why a session ended; a closed set. A session's `reason` says the same in words, and more of it."""

    IDLE = "idle"
    """Nothing was done with it for its time to live."""

    MAX_LIFETIME = "max_lifetime"
    """It was as old as it may become."""

    USER = "user"
    """By request: of a client, or of the operator who stopped the daemon."""

    CRASHED = "crashed"
    """Its PID 1 died, or could not be trusted any more."""

    OOM = "oom"
    """Its PID 1 died while the kernel killed in it for want of memory."""

    HOST_REBOOT = "host_reboot"
    """The machine went down under it."""

    ERROR = "error"
    """It could not be built, or the daemon failed it."""
