"""The catalogue of checks: for each its title, the protection that rests on it, what its lack means, and the exact fix.

Owns wording; performs nothing. A check that fails has the verdict FALLS_BACK where the product then works in another
way (`falls_back`), else MISSING. A fix is a line to type, to put into a file, or to click.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from sandkasten.machine import Check, Verdict


@attrs.frozen
class Subject:
    """What is known of a check beforehand. `consequence` and `fix` are told when it does not work."""

    title: str
    protection: str = ""
    consequence: str = ""
    fix: str = ""
    falls_back: bool = False


CATALOGUE: Mapping[str, Subject] = MappingProxyType(
    {
        "root": Subject("root", "privilege", "nothing can be made", "run this as root (sudo)"),
        "capabilities": Subject(
            "capabilities",
            "privilege",
            "root without these powers can't make sandboxes",
            "in a container: docker run --privileged --cgroupns=host",
        ),
        "kernel": Subject("kernel", "filesystem", "the calls a sandbox is built with came later", "a newer kernel"),
        "namespaces": Subject("namespaces", "namespaces", "sessions would see each other and the machine"),
        "data_dir": Subject("data directory", "filesystem", "no session can have a writable layer there"),
        "space": Subject("disk space", "", "sessions and images will meet a full disk", falls_back=True),
        "probe": Subject("probe", "filesystem", "nothing could be tried"),
        "cgroups": Subject("cgroups", "limits", "a session could use up the machine"),
        "openat2": Subject("openat2", "filesystem", "a link in an image could lead out of it", "a kernel from 5.6 on"),
        "clone3": Subject("clone3", "namespaces", "no process can be started in namespaces of its own"),
        "seccomp": Subject(
            "system call filter",
            "seccomp",
            "every system call of the kernel would be within reach",
            "a kernel with CONFIG_SECCOMP_FILTER; in a container, one that allows seccomp(2)",
        ),
        "mounts": Subject("mount calls", "filesystem", "no root filesystem can be put together"),
        "overlay": Subject("overlayfs", "filesystem", "no session can have a writable layer over an image"),
    }
)


def works(check_id: str, seen: str) -> Check:
    """Return a check that went well."""
    subject = CATALOGUE[check_id]
    return Check(check_id, subject.title, Verdict.WORKS, seen, subject.protection)


def fails(check_id: str, seen: str, *, fix: str | None = None, verdict: Verdict | None = None) -> Check:
    """Return a check that did not; `fix` when it depends on what was seen."""
    subject = CATALOGUE[check_id]
    usual = Verdict.FALLS_BACK if subject.falls_back else Verdict.MISSING
    return Check(
        check_id,
        subject.title,
        verdict or usual,
        seen,
        subject.protection,
        consequence=subject.consequence,
        fix=subject.fix if fix is None else fix,
    )


def judged(check_id: str, ok: bool, seen: str) -> Check:
    """Return the one or the other."""
    return works(check_id, seen) if ok else fails(check_id, seen)
