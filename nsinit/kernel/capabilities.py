"""Drops capabilities: the sets that nsinit, its helpers and PID 1 of a sandbox keep, and the order of dropping.

PID 1's part runs after PID 1 joined the session's user namespace, because joining grants a full set of capabilities
(user_namespaces(7)). No step may be skipped on error.
Sources: capabilities(7); user_namespaces(7); Documentation/userspace-api/no_new_privs.rst.
"""

from __future__ import annotations

import os

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls

RUNNER_ID = 65535
"""Uid and gid of PID 1 inside. 16-bit -1 owns no file of any image, and no command runs with it."""

RUNNER_CAPABILITIES = 1 << k.CAP_SETUID | 1 << k.CAP_SETGID | 1 << k.CAP_KILL | 1 << k.CAP_SYS_PTRACE
"""Effective capabilities of PID 1. None of them gets past file permissions: file requests run with another file system
uid. CAP_SYS_PTRACE is for `/proc/PID/io` of shells, which are not dumpable; ptrace(2) itself the filter refuses."""

ROOT_CAPABILITIES = (
    1 << k.CAP_CHOWN
    | 1 << k.CAP_DAC_OVERRIDE
    | 1 << k.CAP_FOWNER
    | 1 << k.CAP_FSETID
    | 1 << k.CAP_KILL
    | 1 << k.CAP_SETGID
    | 1 << k.CAP_SETUID
)
"""Capabilities of commands of the session's root, on files and processes of the session's own ids: those that package
managers, tar, useradd and su need. docs/adr/0002-root-inside.md has the reason for each, and for each that is not here.
"""

NSINIT_CAPABILITIES = (
    1 << k.CAP_CHOWN
    | 1 << k.CAP_DAC_OVERRIDE
    | 1 << k.CAP_DAC_READ_SEARCH
    | 1 << k.CAP_FOWNER
    | 1 << k.CAP_FSETID
    | 1 << k.CAP_KILL
    | 1 << k.CAP_LINUX_IMMUTABLE
    | 1 << k.CAP_MKNOD
    | 1 << k.CAP_NET_ADMIN
    | 1 << k.CAP_SETFCAP
    | 1 << k.CAP_SETGID
    | 1 << k.CAP_SETPCAP
    | 1 << k.CAP_SETUID
    | 1 << k.CAP_SYS_ADMIN
    | 1 << k.CAP_SYS_CHROOT
    | 1 << k.CAP_SYS_NICE
    | 1 << k.CAP_SYS_PTRACE
    | 1 << k.CAP_SYS_RESOURCE
)
"""Capabilities of nsinit and every process that it starts: for mounts, namespaces, id maps, devices, reading about,
binding to processors, and ending sandboxes. An overlay copies up with the credentials of its mounter, so every right
over files is among them."""

START_CAPABILITIES = NSINIT_CAPABILITIES | 1 << k.CAP_SYSLOG
"""Capabilities of an nsinit that starts: CAP_SYSLOG opens the kernel's log (`kmsg`), and is given up then."""

IMPORT_CAPABILITIES = (
    1 << k.CAP_DAC_READ_SEARCH | 1 << k.CAP_SETFCAP | 1 << k.CAP_SETGID | 1 << k.CAP_SETUID | 1 << k.CAP_SYS_ADMIN
)
"""Capabilities of the process that makes the jail of an unpacker: for the jail's mount and its id maps."""

STORE_CAPABILITIES = (
    IMPORT_CAPABILITIES | 1 << k.CAP_CHOWN | 1 << k.CAP_DAC_OVERRIDE | 1 << k.CAP_FOWNER | 1 << k.CAP_SETPCAP
)
"""Capabilities of an nsinit that serves layers and images alone: those, what it takes to share and to remove files, and
to give capabilities up."""

PROC_GROUP = 524287
"""The machine's group that sees every process in a session's `/proc`. The number lies below every id slot, so no
session has it, not even for its root."""

_SECUREBITS = (
    k.SECBIT_NOROOT
    | k.SECBIT_NOROOT_LOCKED
    | k.SECBIT_NO_SETUID_FIXUP_LOCKED
    | k.SECBIT_KEEP_CAPS_LOCKED
    | k.SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED
)
"""Uid 0 gives no capability by itself: a command of root's has those it was given by name, and loses them with uid 0.
"""


def read_last_capability() -> int:
    """Return the highest capability number of this kernel. Read when nsinit starts: a sandbox has another `/proc`."""
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        return int(file.read())


def give_up(capability: int) -> None:
    """Drop one capability of this process. No later call brings it back in the initial user namespace."""
    syscalls.capset(syscalls.capget() & ~(1 << capability))


def keep_only(capabilities: int, last_capability: int) -> None:
    """Keep those of `capabilities`, a bit mask, that this process has. Neither the process nor a program that it
    executes gets another.
    """
    # execve(2) of a setuid file, or of one with file capabilities, then grants nothing (no_new_privs.rst).
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(last_capability + 1):
        if not capabilities >> capability & 1:
            syscalls.prctl(k.PR_CAPBSET_DROP, capability)
    syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_CLEAR_ALL)
    # Last: to drop from the bounding set takes CAP_SETPCAP (prctl(2)).
    syscalls.capset(syscalls.capget() & capabilities)


def drop_bounding_set(last_capability: int, *, root_inside: bool) -> None:
    """Set no_new_privs and empty the bounding and ambient sets, so that no execve(2) gains a capability.

    The capabilities of root inside become inheritable before: without a bounding set nothing can be added later.
    """
    if root_inside:
        syscalls.capset((1 << last_capability + 1) - 1, inheritable=ROOT_CAPABILITIES)
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(last_capability + 1):
        syscalls.prctl(k.PR_CAPBSET_DROP, capability)
    syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_CLEAR_ALL)


def become_runner() -> None:
    """Change to the runner's uid and gid; the permitted set stays for `keep_runner_capabilities`."""
    # Without it a change from uid 0 to others clears the permitted set (capabilities(7), "Effect of user ID changes").
    syscalls.prctl(k.PR_SET_KEEPCAPS, 1)
    os.setresgid(RUNNER_ID, RUNNER_ID, RUNNER_ID)
    os.setresuid(RUNNER_ID, RUNNER_ID, RUNNER_ID)
    syscalls.prctl(k.PR_SET_KEEPCAPS, 0)


def keep_runner_capabilities(*, root_inside: bool) -> None:
    """Lock the securebits, which takes CAP_SETPCAP, then keep the capabilities to start and kill commands.

    With `root_inside` PID 1 may hand `ROOT_CAPABILITIES` to a child. In PID 1 they are permitted and never effective,
    but for those on files while PID 1 has root's file system uid (capabilities(7), "Effect of user ID changes").
    """
    held = ROOT_CAPABILITIES if root_inside else 0
    kept = RUNNER_CAPABILITIES | held
    # With the locks no process below can change how uid 0, setuid(2) or the ambient set treat capabilities.
    syscalls.capset(kept | 1 << k.CAP_SETPCAP, inheritable=held)
    syscalls.prctl(k.PR_SET_SECUREBITS, _SECUREBITS | (0 if root_inside else k.SECBIT_NO_CAP_AMBIENT_RAISE))
    syscalls.capset(RUNNER_CAPABILITIES, permitted=kept, inheritable=held)


def become_root() -> None:
    """Keep the capabilities of root across execve(2), in a child of PID 1 that has uid 0 and is about to execute a
    command."""
    syscalls.capset(ROOT_CAPABILITIES, inheritable=ROOT_CAPABILITIES)
    # NOROOT is locked, so execve(2) gives uid 0 nothing; ambient capabilities are what survives it (capabilities(7)).
    for capability in range(ROOT_CAPABILITIES.bit_length()):
        if ROOT_CAPABILITIES >> capability & 1:
            syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_RAISE, capability)


def clear_effective() -> None:
    """Empty the effective set until execve(2), which fills it with the ambient capabilities again."""
    syscalls.capset(0, permitted=ROOT_CAPABILITIES, inheritable=ROOT_CAPABILITIES)
