"""Which boot of the machine this is. A pid and a start time mean a process only within one boot.

Reads one file and changes nothing. In a container it is the machine's boot, not the container's.
Source: proc_sys_kernel(5), `random/boot_id`; Documentation/admin-guide/sysctl/kernel.rst.
"""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """Return the id of the present boot, a UUID. Raises `OSError` where `/proc` is not the kernel's."""
    return _BOOT_ID.read_text("ascii").strip()
