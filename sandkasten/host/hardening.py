"""Settings of the machine that no sandbox rests on and that make an escape harder; each with the line that sets it.

Reading is all there is to try: a sysctl is what it says. A setting that this kernel does not have is left out.
Sources: Documentation/admin-guide/sysctl/{fs,kernel}.rst; Documentation/admin-guide/LSM/Yama.rst; tty_ioctl(4) TIOCSTI.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from sandkasten.host.surroundings import read
from sandkasten.model.node import Check, Verdict


@attrs.frozen
class _Setting:
    """`wanted` is written by the fix; anything for which `is_good` holds is well, too."""

    name: str
    wanted: int
    consequence: str
    is_good: Callable[[int, int], bool] = int.__ge__


_SETTINGS = (
    _Setting("fs.protected_symlinks", 1, "links in shared directories such as /tmp can trick programs of the machine"),
    _Setting("fs.protected_hardlinks", 1, "users of the machine can keep a hard link to files they may not read"),
    _Setting("fs.protected_fifos", 1, "FIFOs in shared directories can trick programs of the machine"),
    _Setting("fs.protected_regular", 1, "files in shared directories can trick programs of the machine"),
    _Setting("kernel.dmesg_restrict", 1, "every user of the machine can read kernel addresses in its log"),
    _Setting("kernel.kptr_restrict", 1, "kernel addresses can be read in /proc"),
    _Setting("kernel.unprivileged_bpf_disabled", 1, "users of the machine can load BPF programs"),
    _Setting("kernel.yama.ptrace_scope", 1, "a user's programs can trace each other outside of sandboxes"),
    _Setting("dev.tty.legacy_tiocsti", 0, "a program can type into the terminal it was started from", int.__eq__),
    _Setting("kernel.io_uring_disabled", 1, "io_uring is open to users of the machine"),
)


def check_settings(proc: str = "/proc") -> list[Check]:
    """Return one check for each setting that this kernel has."""
    found = ((each, read(f"{proc}/sys/{each.name.replace('.', '/')}").strip()) for each in _SETTINGS)
    return [_check(each, int(text)) for each, text in found if text.isdigit()]


def _check(setting: _Setting, value: int) -> Check:
    if setting.is_good(value, setting.wanted):
        return Check(setting.name, setting.name, Verdict.WORKS, f"is {value}")
    fix = f"sysctl -w {setting.name}={setting.wanted} (and the same line in /etc/sysctl.d/60-sandkasten.conf)"
    return Check(
        setting.name,
        setting.name,
        Verdict.FALLS_BACK,
        f"is {value}",
        consequence=setting.consequence,
        fix=fix,
    )
