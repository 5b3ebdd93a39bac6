"""Whom the kernel ends when a sandbox has no memory left: what runs for a user, and PID 1 last, even while it forks.

A fork has PID 1's score, so PID 1 has that of a command while it forks (`spawn.fork`), and where all else is small it
would be the largest of that score. What has become a program gets a higher one still: from then on its directory below
/proc is its user's, as whom PID 1 writes there. It must not read anything there.

Sources: proc_pid_oom_score_adj(5); PR_SET_DUMPABLE(2const) (who owns /proc/<pid>, and since when).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from runner.loop.context import Context
from runner.loop.identity import UserIdentity

_SCORE = b"1000"
_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 2.0
_FACTOR = 1.5
"""How long to wait for a fork to become a program: it takes a millisecond or two."""


def offer(identity: UserIdentity, pid: int) -> bool:
    """Have the kernel end a user's program before PID 1; False if it is none yet."""
    try:
        with identity:
            fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return False
    except OSError:
        return True  # it ended this instant
    try:
        os.write(fd, _SCORE)
    except OSError:
        pass  # the score that it has is a fair one
    finally:
        os.close(fd)
    return True


def offer_soon(
    context: Context, identity: UserIdentity, find_pid: Callable[[], int | None], *, after_s: float = _FIRST_LOOK_S
) -> None:
    """The same as soon as a fork has become a program; `find_pid` returns None once it has ended."""

    def look() -> None:
        pid = find_pid()
        if pid is not None and not offer(identity, pid) and after_s < _LAST_LOOK_S:
            offer_soon(context, identity, find_pid, after_s=after_s * _FACTOR)

    context.loop.call_later(after_s, look, lambda _error: None)
