"""A machine with a pure cgroup v2 tree and an older kernel, emulated: Debian's own packages under qemu, without KVM.

Owns the disks and the command line. The root disk (a minimal system with kernel, Python and this environment's
packages) is made once and kept in the user's cache; the project's disk is made for each run and costs milliseconds.
Nothing of the running system is changed and the guest has no network. Sources: qemu(1), mke2fs(8), mmdebstrap(1).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import debian

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "linux-image-cloud-amd64,python3,kmod"
BOOT_S = 600
_RECIPE = "1"
"""Raise it when the root disk must be made anew."""
_PROJECT = ("sandkasten", "nsinit", "runner", "tests", "pyproject.toml")
_NOT_NEEDED = ("mypy", "mypyc", "pip", "setuptools", "libcst", "ruff", "*__mypyc*", "__pycache__")


def boot(tests: list[str]) -> str:
    """Run test files of this project in the machine and return what it printed.

    Raises:
        debian.Unavailable: what it takes can't be had here; the message says what.
    """
    _check_host()
    with _parts() as parts, tempfile.TemporaryDirectory(prefix="sandkasten-vm-") as scratch:
        project = Path(scratch) / "project.ext4"
        _make_project_disk(project)
        command = ["qemu-system-x86_64", "-machine", "q35,accel=tcg", "-cpu", "max", "-smp", "2", "-m", "1024"]
        command += ["-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio", "-snapshot"]
        command += ["-kernel", str(parts / "vmlinuz"), "-initrd", str(parts / "initrd")]
        for disk in (parts / "root.ext4", project):
            command += ["-drive", f"file={disk},format=raw,if=virtio"]
        arguments = f"console=ttyS0 root=/dev/vda rw quiet panic=-1 cgroup_no_v1=all sandkasten.tests={','.join(tests)}"
        command += ["-append", f"{arguments} init=/sandkasten-init"]
        environment = {**os.environ, "TMPDIR": scratch}  # what -snapshot writes
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOT_S, check=False, env=environment
        )
        return (done.stdout + done.stderr).decode(errors="replace").replace("\r\n", "\n")


def _check_host() -> None:
    if platform.machine() != "x86_64":
        raise debian.Unavailable("the machine is made for x86_64")
    if os.geteuid() != 0:
        raise debian.Unavailable("needs root to make the machine's disk")
    for program in ("qemu-system-x86_64", "mmdebstrap", "mke2fs"):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            raise debian.Unavailable(f"needs {program}")


@contextmanager
def _parts() -> Iterator[Path]:
    """Hold the directory with `vmlinuz`, `initrd` and `root.ext4`, making it if there is none for this environment."""
    suite = debian.codename()
    lock = (ROOT / "requirements-dev.lock").read_bytes() + (ROOT / "tests/vm/guest/init.sh").read_bytes()
    version = f"{suite} {sys.version_info[:2]} {_RECIPE} {hashlib.sha256(lock).hexdigest()}"
    with debian.exclusive(f"vm-{suite}") as directory:
        known = directory / "version"
        if not known.exists() or known.read_text() != version:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            _make_root_disk(directory, suite)
            known.write_text(version)
        yield directory


def _make_root_disk(directory: Path, suite: str) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkasten-vm-", dir=directory) as scratch:
        root = Path(scratch) / "root"
        source_files = [str(path) for path in debian.sources(suite)]
        debian.run(
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--format=directory"),
            *(f"--include={PACKAGES}", suite, str(root), *source_files),
        )
        _check_python(root)
        for name in ("vmlinuz", "initrd.img"):
            (boot_file,) = (root / "boot").glob(f"{name}-*")
            shutil.move(boot_file, directory / name.removesuffix(".img"))
        site = root / "opt/site-packages"
        shutil.copytree(sysconfig.get_path("purelib"), site, ignore=shutil.ignore_patterns(*_NOT_NEEDED), symlinks=True)
        shutil.copy(ROOT / "tests/vm/guest/init.sh", root / "sandkasten-init")
        (root / "project").mkdir()
        _make_disk(directory / "root.ext4", root, megabytes=2048)


def _check_python(root: Path) -> None:
    """The environment's compiled packages must fit the machine's own Python."""
    wanted = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not (root / "usr/bin" / wanted).exists():
        raise debian.Unavailable(f"the distribution's Python is not {wanted}")


def _make_project_disk(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkasten-vm-") as scratch:
        for name in _PROJECT:
            source, target = ROOT / name, Path(scratch) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        _make_disk(path, Path(scratch), megabytes=64)


def _make_disk(path: Path, tree: Path, *, megabytes: int) -> None:
    with path.open("wb") as disk:
        disk.truncate(megabytes * 1024**2)
    program = shutil.which("mke2fs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "mke2fs"
    options = ["-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1", "-d", str(tree)]
    debian.run(program, *options, str(path))
