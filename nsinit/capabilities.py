"""Gives power away: what PID 1 of a sandbox keeps, and in which order the rest goes.

Runs after the session's user namespace was joined, because joining grants a full set of everything again. Nothing
here may be skipped on error.
Sources: capabilities(7); user_namespaces(7); Documentation/userspace-api/no_new_privs.rst.
"""

from __future__ import annotations

import os

from nsinit import constants as k
from nsinit import syscalls

RUNNER_ID = 65535
"""Uid and gid of PID 1 inside. 16-bit -1 owns no file of any image, and no command runs as it."""

RUNNER_CAPABILITIES = 1 << k.CAP_SETUID | 1 << k.CAP_SETGID | 1 << k.CAP_KILL
_SECUREBITS = (
    k.SECBIT_NOROOT
    | k.SECBIT_NOROOT_LOCKED
    | k.SECBIT_NO_SETUID_FIXUP_LOCKED
    | k.SECBIT_KEEP_CAPS_LOCKED
    | k.SECBIT_NO_CAP_AMBIENT_RAISE
    | k.SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED
)


def read_last_capability() -> int:
    """Return the highest capability number of this kernel (read at start: `/proc` differs inside)."""
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        return int(file.read())


def give_up(capability: int) -> None:
    """Go on without one capability of those this process has (root of the initial user namespace: for good)."""
    with open("/proc/self/status", "rb") as file:
        (permitted,) = (line.split()[1] for line in file if line.startswith(b"CapPrm:"))
    syscalls.capset(int(permitted, 16) & ~(1 << capability))


def drop_bounding_set(last_capability: int) -> None:
    """no_new_privs, then an empty bounding and ambient set: no exec can ever gain a capability."""
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(last_capability + 1):
        syscalls.prctl(k.PR_CAPBSET_DROP, capability)
    syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_CLEAR_ALL)


def become_runner() -> None:
    """Change to the runner's uid and gid, keeping permitted capabilities for `keep_runner_capabilities`."""
    syscalls.prctl(k.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(RUNNER_ID, RUNNER_ID, RUNNER_ID)
    os.setresuid(RUNNER_ID, RUNNER_ID, RUNNER_ID)
    syscalls.prctl(k.PR_SET_KEEPCAPS, 0)


def keep_runner_capabilities() -> None:
    """Lock the securebits (which takes CAP_SETPCAP), then keep only what starting and killing commands takes."""
    syscalls.capset(RUNNER_CAPABILITIES | 1 << k.CAP_SETPCAP)
    syscalls.prctl(k.PR_SET_SECUREBITS, _SECUREBITS)
    syscalls.capset(RUNNER_CAPABILITIES)
