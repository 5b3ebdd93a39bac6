"""What surrounds this process (container, WSL, filter, security module) and the fix that follows from it.

Reads a few files, performs nothing. `advise` turns a failed call into the line that mends it here: the same EPERM has
another cure in a container, under AppArmor and behind a sysctl. Sources: user_namespaces(7), proc(5), seccomp(2);
Documentation/admin-guide/sysctl/{kernel,user}.rst; Ubuntu's notes on restricted user namespaces.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Mapping

import attrs

_SYSCTLS = ("kernel/unprivileged_userns_clone", "kernel/apparmor_restrict_unprivileged_userns")
_LIMITED = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_REFUSED = (errno.EPERM, errno.EACCES)

CONTAINER_FIX = (
    "docker run --privileged --cgroupns=host -v sandkasten:/var/lib/sandkasten ... (podman: the same, as root); "
    "a container without privilege can't make sandboxes"
)


@attrs.frozen
class Host:
    """`container`: its kind, empty outside of one. `sysctls` maps names to values, of those that exist."""

    euid: int = 0
    container: str = ""
    is_wsl: bool = False
    is_filtered: bool = False
    sysctls: Mapping[str, str] = attrs.field(factory=dict)


def read_host(root: str = "/") -> Host:
    """Look around. `root` is where the machine's files are."""
    status = read(f"{root}proc/self/status")
    names = (*_SYSCTLS, *(f"user/max_{kind}_namespaces" for kind in _LIMITED))
    values = {name: read(f"{root}proc/sys/{name}").strip() for name in names}
    return Host(
        euid=os.geteuid(),
        container=_container(root),
        is_wsl="microsoft" in read(f"{root}proc/sys/kernel/osrelease").lower(),
        is_filtered=re.search(r"^Seccomp:\s*2", status, re.MULTILINE) is not None,
        sysctls={name: value for name, value in values.items() if value},
    )


def _container(root: str) -> str:
    for name, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if os.path.exists(f"{root}{name}"):
            return kind
    named = read(f"{root}run/systemd/container").strip()
    match = re.search(r"(?:^|\0)container=([\w.-]+)", read(f"{root}proc/1/environ"))
    found = named or (match[1] if match else "")
    return "" if found == "wsl" else found


def advise(check_id: str, number: int, host: Host, usual: str) -> str:
    """Return the fix of a check that failed with an errno; `usual` is that of the catalogue."""
    if check_id in ("namespaces", "user_namespace", "capability_drop", "loopback") and (fix := _namespace_fix(host)):
        return fix
    if number == errno.ENOSYS and host.is_filtered:
        return f"a filter refuses the call (a container's): docker run --security-opt seccomp=unconfined ...; {usual}"
    if number in _REFUSED and host.container:
        return CONTAINER_FIX
    return usual


def _namespace_fix(host: Host) -> str:
    for kind in _LIMITED:
        name = f"user/max_{kind}_namespaces"
        if host.sysctls.get(name) == "0":
            return f"sysctl -w {name.replace('/', '.')}=65536 (and the same line in /etc/sysctl.d/60-sandkasten.conf)"
    if host.sysctls.get("kernel/unprivileged_userns_clone") == "0":
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if host.sysctls.get("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return apparmor_fix(os.path.realpath(sys.executable))
    return ""


def apparmor_fix(program: str) -> str:
    """Return the profile that lets a program make user namespaces, and how to load it."""
    return f"""\
put this into /etc/apparmor.d/sandkasten and run `apparmor_parser -r /etc/apparmor.d/sandkasten`:
abi <abi/4.0>,
include <tunables/global>
profile sandkasten {program} flags=(unconfined) {{
  userns,
}}"""


def read(path: str) -> str:
    """Return the text of a file, empty if it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
