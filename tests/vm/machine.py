"""A machine with a pure cgroup v2 tree and an older kernel, emulated: Debian's own packages under qemu, without KVM.

Owns the command line and what the machine is told to do. The guest has two processors and a worker for each, no
network, and writes to copies of its disks. What emulation makes dear is switched off: protections of the guest's kernel
against speculation, which an emulated processor has none of, a fifth level of page tables, and the copying and clearing
of pages byte by byte in one instruction, which is fast on a real processor only.
Sources: qemu(1); Documentation/admin-guide/kernel-parameters.txt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import debian
from tests.vm import disks

BOOT_S = 900
PROCESSORS = 2
SLOWNESS = 6
"""Factor by which an emulated processor on a busy machine is slower than a real one, for limits that tests set."""
_MEMORY_MB = 2048
_QEMU = "qemu-system-x86_64"
_KERNEL = (
    *("console=ttyS0", "quiet", "panic=-1", "cgroup_no_v1=all", "mitigations=off", "no5lvl", "audit=0", "apparmor=0"),
    "random.trust_cpu=on",
)
"""The kernel's parameters. Where systemd runs the machine, the clock is another: a time stamp counter that was measured
in a bad moment of a busy machine runs ten times too fast, and systemd's deadlines end what they meet.
"""


def marked_tests(*markers: str) -> str:
    """Return what runs this processor's half of the tests with one of the markers."""
    names = [
        path
        for path in (disks.ROOT / "tests").rglob("test_*.py")
        if any(f"mark.{each}" in path.read_text() for each in markers)
    ]
    files = sorted(str(path.relative_to(disks.ROOT)) for path in names)
    options = "-p no:cacheprovider -p no:hypothesispytest -p tests.vm.split --color=no --durations=8"
    chosen = " or ".join(markers)
    return f"env SANDKASTEN_TEST_SLOWNESS={SLOWNESS} python3 -m pytest {options} -m '{chosen}' {' '.join(files)}"


def boot(script: str, *, workers: int = 1, is_systemd: bool = False) -> str:
    """Run a shell script in the machine, once for each worker, and return what it printed.

    With `is_systemd` the machine runs systemd, and the script is one of its services.

    Raises:
        debian.Unavailable: what it takes can't be had here; the message says what.
    """
    disks.check_host()
    if shutil.which(_QEMU) is None:
        raise debian.Unavailable(f"needs {_QEMU}")
    with disks.boot_parts() as parts, tempfile.TemporaryDirectory(prefix="sandkasten-vm-") as scratch:
        project, data = Path(scratch) / "project.ext4", Path(scratch) / "data.ext4"
        plan = {"guest-work": script, "guest-workers": str(workers)} | ({"guest-systemd": ""} if is_systemd else {})
        disks.make_project_disk(project, plan)
        disks.make_quota_disk(data)
        done = subprocess.run(
            _command(parts, (parts / "root.ext4", project, data), is_systemd=is_systemd),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BOOT_S,
            check=False,
            env={**os.environ, "TMPDIR": scratch},  # the copies that -snapshot writes
        )
        return (done.stdout + done.stderr).decode(errors="replace").replace("\r\n", "\n")


def _command(parts: Path, drives: Sequence[Path], *, is_systemd: bool) -> list[str]:
    clock = "tsc=unstable" if is_systemd else "tsc=reliable"  # see _KERNEL
    command = [_QEMU, "-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512"]
    command += ["-cpu", "max,la57=off,erms=off,fsrm=off", "-smp", str(PROCESSORS), "-m", str(_MEMORY_MB)]
    command += ["-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio", "-snapshot"]
    command += [
        "-kernel",
        str(parts / "vmlinuz"),
        "-initrd",
        str(parts / "initrd"),
        "-append",
        " ".join((*_KERNEL, clock)),
    ]
    for drive in drives:
        command += ["-drive", f"file={drive},format=raw,if=virtio,cache=unsafe"]
    return command
