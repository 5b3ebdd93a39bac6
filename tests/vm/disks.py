"""The machine's disks: a root of Debian packages that is made once and cached, and two that are made for each run.

The root has kernel, Python and this environment's packages, compiled; the project's disk has the source, compiled too,
and the plan of the run; the third is empty and counts by project. Nothing of the running system is changed.
Sources: mmdebstrap(1), mke2fs(8), ext4(5) quota and project.
"""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import os
import platform
import py_compile
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

from tests import debian
from tests.vm import initramfs

ROOT = Path(__file__).resolve().parents[2]
GUEST = ROOT / "tests/vm/guest"
PACKAGES = "linux-image-cloud-amd64,python3,kmod,busybox-static,e2fsprogs,xfsprogs,btrfs-progs,iproute2,procps,systemd"
_RECIPE = "7"
"""Version of the root disk's recipe, to be raised when the disk must be made anew."""
_PROJECT = ("sandkasten", "nsinit", "runner", "egress", "tests", "config", "pyproject.toml")
_PROJECT_NAME = "sandkasten-runtime"
_NOT_NEEDED = ("mypy", "mypyc", "pip", "setuptools", "libcst", "ruff", "atheris*", "*__mypyc*", "*.pyi")
_MODULES = ("virtio_pci", "virtio_blk")
_SCRIPT = '#!/bin/sh\nexec python3 -m sandkasten "$@"\n'


def check_host() -> None:
    """Raise `debian.Unavailable` where the disks can't be made."""
    if platform.machine() != "x86_64":
        raise debian.Unavailable("the machine is made for x86_64")
    if os.geteuid() != 0:
        raise debian.Unavailable("needs root to make the machine's disk")
    for program in ("mmdebstrap", "mke2fs"):
        if shutil.which(program, path=_path()) is None:
            raise debian.Unavailable(f"needs {program}")


@contextmanager
def boot_parts() -> Iterator[Path]:
    """Hold the directory with `vmlinuz`, `initrd` and `root.ext4`, making it if there is none for this environment.

    Any number of machines may run from it at once: none writes to it, and it is not made anew while one runs.
    """
    suite = debian.codename()
    version = disk_version(suite, Path(sysconfig.get_path("purelib")))
    with (debian.cache_dir() / f"machine-{suite}.lock").open("w") as lock:
        directory = debian.cache_dir() / f"machine-{suite}"
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not _is_made(directory, version):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_made(directory, version):
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                _make_root_disk(directory, suite)
                (directory / "version").write_text(version)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield directory


def make_project_disk(path: Path, plan: Mapping[str, str]) -> None:
    """Make a disk of the project as it is and of the files of `plan`."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-vm-") as scratch:
        for name in _PROJECT:
            source, target = ROOT / name, Path(scratch) / name
            if source.is_dir():
                shutil.copytree(source, target)
            elif source.exists():
                shutil.copy2(source, target)
        for name, text in plan.items():
            (Path(scratch) / name).write_text(text)
        _compile(Path(scratch), "/project")
        Path(scratch).chmod(0o755)  # for accounts other than root
        _make_disk(path, Path(scratch), megabytes=64)


def make_quota_disk(path: Path) -> None:
    """Make an empty disk that counts blocks and inodes by project."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-vm-") as scratch:
        _make_disk(path, Path(scratch), megabytes=2048, features=("quota", "project"))


def disk_version(suite: str, packages: Path) -> str:
    """Return what a disk is made from: it is used again as long as this stays the same."""
    content = b"".join(path.read_bytes() for path in sorted(GUEST.iterdir()))
    content += installed(packages)
    return f"{suite} {sys.version_info[:2]} {_RECIPE} {hashlib.sha256(content).hexdigest()}"


def installed(packages: Path) -> bytes:
    """Return what identifies the content of an environment: each distribution's name, version and hashes of files.

    A lock file says what should be there; an installation that was interrupted has less. Left out is what tells where
    the environment lies (the project itself, which is linked, and the scripts), so that all clones share a disk.
    """
    known = []
    for each in distributions(path=[str(packages)]):
        lines = (each.read_text("RECORD") or "").splitlines()
        if each.name != _PROJECT_NAME:
            known.append((each.name, each.version, sorted(line for line in lines if not line.startswith("../"))))
    return repr(sorted(known)).encode()


def _is_made(directory: Path, version: str) -> bool:
    known = directory / "version"
    return known.exists() and known.read_text() == version


def _make_root_disk(directory: Path, suite: str) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkasten-vm-", dir=directory) as scratch:
        root = Path(scratch) / "root"
        debian.run(
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--format=directory"),
            *(f"--include={PACKAGES}", suite, str(root), *debian.source().entries),
        )
        _check_python(root)
        (kernel,) = (root / "boot").glob("vmlinuz-*")
        shutil.move(kernel, directory / "vmlinuz")
        (directory / "initrd").write_bytes(_make_initrd(root))
        shutil.rmtree(root / "boot")
        site = root / "opt/site-packages"
        shutil.copytree(sysconfig.get_path("purelib"), site, ignore=shutil.ignore_patterns(*_NOT_NEEDED), symlinks=True)
        _compile(site, "/opt/site-packages")
        # Read by every Python but those with -S, while -I takes no notice of PYTHONPATH (site, "Path configuration").
        (root / "usr/lib/python3/dist-packages/site-packages.pth").write_text("/opt/site-packages\n/project\n")
        _write_program(root / "sandkasten-init", (GUEST / "init.sh").read_text())
        _write_program(root / "usr/bin/sandkasten", _SCRIPT)
        _add_unit(root, GUEST / "guest-work.service")
        for name in ("project", "data"):
            (root / name).mkdir()
        _make_disk(directory / "root.ext4", root, megabytes=2048)


def _add_unit(root: Path, unit: Path) -> None:
    """Add a unit that systemd starts, where systemd runs the machine. A machine with a console has nobody to log in."""
    units = root / "etc/systemd/system"
    shutil.copy(unit, units)
    (units / "multi-user.target.wants" / unit.name).symlink_to(f"../{unit.name}")
    for name in ("getty.target", "apt-daily.timer", "systemd-update-utmp.service"):
        (units / name).symlink_to("/dev/null")


def _check_python(root: Path) -> None:
    """The environment's compiled packages must fit the machine's own Python."""
    wanted = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not (root / "usr/bin" / wanted).exists():
        raise debian.Unavailable(f"the distribution's Python is not {wanted}")


def _make_initrd(root: Path) -> bytes:
    (modules,) = (root / "lib/modules").iterdir()
    paths = initramfs.load_order((modules / "modules.dep").read_text(), _MODULES)
    files = {"init": (GUEST / "early.sh").read_bytes(), "bin/busybox": (root / "bin/busybox").read_bytes()}
    for place, path in enumerate(paths):
        files[f"modules/{place:02}-{Path(path).name}"] = (modules / path).read_bytes()
    return initramfs.archive(files)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _compile(tree: Path, where: str) -> None:
    """Compile all Python of `tree`, which will lie at `where`: an emulated processor takes long to do it."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        tree,
        maxlevels=30,
        quiet=2,
        workers=os.cpu_count() or 1,
        stripdir=tree,
        prependdir=where,
        invalidation_mode=mode,
    )


def _make_disk(path: Path, tree: Path, *, megabytes: int, features: tuple[str, ...] = ()) -> None:
    with path.open("wb") as disk:
        disk.truncate(megabytes * 1024**2)
    program = shutil.which("mke2fs", path=_path()) or "mke2fs"
    options = ["-q", "-t", "ext4", "-O", ",".join(("^has_journal", *features)), "-E", "lazy_itable_init=1"]
    debian.run(program, *options, "-d", str(tree), str(path))


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
