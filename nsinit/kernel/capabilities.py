"""Gives power away: what nsinit, its helpers and PID 1 of a sandbox keep, and in which order the rest goes.

PID 1's part runs after the session's user namespace was joined, because joining grants a full set of everything again.
Nothing here may be skipped on error.
Sources: capabilities(7); user_namespaces(7); Documentation/userspace-api/no_new_privs.rst.
"""

from __future__ import annotations

import os

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls

RUNNER_ID = 65535
"""Uid and gid of PID 1 inside. 16-bit -1 owns no file of any image, and no command runs as it."""

RUNNER_CAPABILITIES = 1 << k.CAP_SETUID | 1 << k.CAP_SETGID | 1 << k.CAP_KILL
"""What PID 1 can use. Nothing of it may get past file permissions: file requests run as PID 1 with another file system
uid."""

ROOT_CAPABILITIES = (
    1 << k.CAP_CHOWN
    | 1 << k.CAP_DAC_OVERRIDE
    | 1 << k.CAP_FOWNER
    | 1 << k.CAP_FSETID
    | 1 << k.CAP_KILL
    | 1 << k.CAP_SETGID
    | 1 << k.CAP_SETUID
)
"""What commands of the session's root have: what package managers, tar, useradd and su need, on files and processes of
the session's own ids. docs/adr/0002-root-inside.md has the reason for each, and for each that is not here."""

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
    | 1 << k.CAP_SYS_PTRACE
    | 1 << k.CAP_SYS_RESOURCE
)
"""What nsinit has, and whatever it starts: for mounts, namespaces, id maps, devices, looking at and ending sandboxes.
An overlay copies up with the rights of who mounted it, so that all a file may have is among them."""

START_CAPABILITIES = NSINIT_CAPABILITIES | 1 << k.CAP_SYSLOG
"""What nsinit needs to start: it opens the kernel's log first (`kmsg`), and can do so never again."""

IMPORT_CAPABILITIES = (
    1 << k.CAP_DAC_READ_SEARCH | 1 << k.CAP_SETFCAP | 1 << k.CAP_SETGID | 1 << k.CAP_SETUID | 1 << k.CAP_SYS_ADMIN
)
"""What an nsinit that has an archive unpacked keeps: for the way to the draft, for the jail's mount and its id maps."""

PROC_GROUP = 524287
"""The machine's group that sees every process in a session's `/proc`. It lies below every id slot, so no session can
name it, not even its root."""

_SECUREBITS = (
    k.SECBIT_NOROOT
    | k.SECBIT_NOROOT_LOCKED
    | k.SECBIT_NO_SETUID_FIXUP_LOCKED
    | k.SECBIT_KEEP_CAPS_LOCKED
    | k.SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED
)
"""Uid 0 means nothing by itself: what a command of root's has, it was given by name, and it dies with uid 0."""


def read_last_capability() -> int:
    """Return the highest capability number of this kernel (read at start: `/proc` differs inside)."""
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        return int(file.read())


def give_up(capability: int) -> None:
    """Go on without one capability of those this process has (root of the initial user namespace: for good)."""
    syscalls.capset(syscalls.capget() & ~(1 << capability))


def keep_only(capabilities: int, last_capability: int) -> None:
    """Keep those of the mask that this process has; neither it nor what it executes gets one of the others again."""
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(last_capability + 1):
        if not capabilities >> capability & 1:
            syscalls.prctl(k.PR_CAPBSET_DROP, capability)
    syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(syscalls.capget() & capabilities)


def drop_bounding_set(last_capability: int, *, root_inside: bool) -> None:
    """no_new_privs, then an empty bounding and ambient set: no exec can ever gain a capability.

    What root inside shall have becomes inheritable before: later, without a bounding set, nothing can.
    """
    if root_inside:
        syscalls.capset((1 << last_capability + 1) - 1, inheritable=ROOT_CAPABILITIES)
    syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(last_capability + 1):
        syscalls.prctl(k.PR_CAPBSET_DROP, capability)
    syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_CLEAR_ALL)


def become_runner() -> None:
    """Change to the runner's uid and gid, keeping permitted capabilities for `keep_runner_capabilities`."""
    syscalls.prctl(k.PR_SET_KEEPCAPS, 1)
    os.setresgid(RUNNER_ID, RUNNER_ID, RUNNER_ID)
    os.setresuid(RUNNER_ID, RUNNER_ID, RUNNER_ID)
    syscalls.prctl(k.PR_SET_KEEPCAPS, 0)


def keep_runner_capabilities(*, root_inside: bool) -> None:
    """Lock the securebits (which takes CAP_SETPCAP), then keep only what starting and killing commands takes.

    With `root_inside` PID 1 may hand `ROOT_CAPABILITIES` to a child. It has them permitted and never effective itself,
    but for those on files while it has root's file system uid (capabilities(7), "Effect of user ID changes").
    """
    held = ROOT_CAPABILITIES if root_inside else 0
    kept = RUNNER_CAPABILITIES | held
    syscalls.capset(kept | 1 << k.CAP_SETPCAP, inheritable=held)
    syscalls.prctl(k.PR_SET_SECUREBITS, _SECUREBITS | (0 if root_inside else k.SECBIT_NO_CAP_AMBIENT_RAISE))
    syscalls.capset(RUNNER_CAPABILITIES, permitted=kept, inheritable=held)


def become_root() -> None:
    """In a child of PID 1 that has uid 0 and is about to execute a command: keep what root has, across execve(2)."""
    syscalls.capset(ROOT_CAPABILITIES, inheritable=ROOT_CAPABILITIES)
    for capability in range(ROOT_CAPABILITIES.bit_length()):
        if ROOT_CAPABILITIES >> capability & 1:
            syscalls.prctl(k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_RAISE, capability)
