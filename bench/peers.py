"""Other ways to run a program in a sandbox on this machine, with their exact commands and what each isolates.

All of them run the same program on the same root file system, the machine's own: the tree that the image `host` binds.
A peer that is not installed or does not run here is reported with its error. The OCI runtimes get a specification of
their own default without a terminal, and keep their state in the benchmark's directory. runc makes its cgroups beneath
the benchmark's own, podman in a directory that is removed with the peers; crun and runsc, which would make theirs at
the top of each hierarchy, run without. What the table of isolation says was read inside of each, from `uid_map` and
`status` in `/proc/self`, and for runsc from its own process outside.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from sandkasten.images.catalog import Catalog
from sandkasten.images.host import ensure_host_image

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
FLOOR = "fork + exec"
PROGRAM, _ANSWER = ("bash", "-c", "echo ok"), b"ok\n"
COMMAND = ("/bin/true",)
"""The command for a container that is there already; the row that it is compared with runs the same."""


@attrs.frozen
class Peer:
    """A program to compare with. `isolates` are the columns of the table of isolation; `reason` tells why it can't be
    measured, or is empty."""

    name: str
    command: Sequence[str]
    isolates: Mapping[str, str]
    cwd: Path
    version: str = ""
    reason: str = ""

    def run(self) -> None:
        """Start the peer once, and check that the program has run. Raises `RuntimeError`."""
        _run(self.command, self.cwd, _ANSWER)


@attrs.frozen
class RunningContainer:
    """A container of an OCI runtime that is there for `exec`."""

    runtime: str
    options: Sequence[str]
    name: str
    bundle: Path

    def exec(self) -> None:
        """Run a program inside. Raises `RuntimeError`."""
        _run((*self.options, "exec", self.name, *COMMAND), self.bundle, b"")

    def remove(self) -> None:
        """End the container."""
        command = (*self.options, "delete", "--force", self.name)
        subprocess.run(command, cwd=self.bundle, capture_output=True, timeout=30, check=False, env={"PATH": PATH})


ASPECTS = (
    "processes",
    "files",
    "network",
    "users",
    "system calls",
    "memory and CPU",
    "disk",
    "further commands",
)
OURS = dict.fromkeys(ASPECTS, "yes") | {"system calls": "strict filter, Landlock", "network": "none but loopback"}


@contextmanager
def peers_in(scratch: Path) -> Iterator[Sequence[Peer]]:
    """Yield all peers, on the root file system of the image `host`; those included that can't be measured here."""
    scratch.mkdir()
    # podman(1) refuses a --runroot of more than 50 characters.
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/run") as runroot:
        try:
            yield _find_peers(scratch, runroot)
        finally:
            found = *_CGROUPS.glob(f"{_cgroup()}/**"), *_CGROUPS.glob(f"*/{_cgroup()}/**")
            for directory in sorted(found, reverse=True):  # innermost first
                with suppress(FileNotFoundError):  # a link of another name to the same hierarchy
                    directory.rmdir()


_CGROUPS = Path("/sys/fs/cgroup")


def _cgroup() -> str:
    """Return the name of podman's cgroup. It is at the top of each hierarchy, and not named as the project's own are:
    tests that run beside the benchmark's would take it for theirs."""
    return f"bench-{os.getpid()}-podman"


def _find_peers(scratch: Path, runroot: str) -> Sequence[Peer]:
    catalog = Catalog(scratch / "data")
    ensure_host_image(catalog)
    rootfs = catalog.trees("host")[0]
    for name in rootfs.rglob("*"):
        if stat.S_ISCHR(name.lstat().st_mode):  # a whiteout is read by overlayfs alone: systemd-nspawn stops at one
            name.unlink()
    no = dict.fromkeys(ASPECTS, "no")
    spaces = no | {"processes": "yes", "files": "yes", "network": "none", "system calls": "capabilities only"}
    oci = spaces | {"further commands": "yes"}
    gvisor = oci | {"users": "its kernel runs as nobody", "system calls": "a kernel of its own"}
    podman = oci | {"system calls": "list of its own"}
    nspawn = spaces | {"users": "yes", "system calls": "list of its own"}
    return [
        _peer(FLOOR, PROGRAM, no, scratch),
        _peer("bubblewrap", _bubblewrap(rootfs), spaces | {"users": "one: root is the machine's"}, scratch),
        _peer("runc", _oci("runc", rootfs, scratch), oci, scratch),
        _peer("crun", _oci("crun", rootfs, scratch), oci, scratch),
        _peer("podman", _podman(rootfs, scratch, runroot), podman, scratch),
        _peer("systemd-nspawn", _nspawn(rootfs), nspawn, scratch),
        _peer("runsc", _oci("runsc", rootfs, scratch), gvisor, scratch),
    ]


def start_container(runtime: str, scratch: Path) -> RunningContainer:
    """Start a container that sleeps. Raises `RuntimeError`."""
    bundle = scratch / runtime
    path = bundle / "config.json"
    spec = json.loads(path.read_text())
    command = spec["process"]["args"]
    spec["process"]["args"] = ["sleep", "3600"]
    path.write_text(json.dumps(spec))
    options = _options(runtime, scratch)
    found = RunningContainer(runtime, options, f"sandkasten-bench-{os.getpid()}-exec", bundle)
    try:
        with tempfile.TemporaryFile() as errors:  # not a pipe: the container keeps the descriptor
            done = subprocess.run(
                (*options, "run", "--detach", "--bundle", str(bundle), found.name),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                timeout=30,
                check=False,
                env={"PATH": PATH},
            )
            errors.seek(0)
            told = errors.read().decode(errors="replace").strip()
    finally:
        spec["process"]["args"] = command
        path.write_text(json.dumps(spec))
    if done.returncode:
        raise RuntimeError(told)
    return found


def _peer(name: str, command: Sequence[str], isolates: Mapping[str, str], cwd: Path) -> Peer:
    program = command[0]
    if shutil.which(program, path=PATH) is None:
        return Peer(name, command, isolates, cwd, reason=f"{program} is not installed")
    told = subprocess.run((program, "--version"), capture_output=True, text=True, check=False, env={"PATH": PATH})
    peer = Peer(name, command, isolates, cwd, version=(told.stdout.splitlines() or [""])[0])
    try:
        peer.run()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return attrs.evolve(peer, reason=str(error)[:300])
    return peer


def _run(command: Sequence[str], cwd: Path, answer: bytes) -> None:
    done = subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False, env={"PATH": PATH}
    )
    if done.returncode or done.stdout != answer:
        raise RuntimeError(f"{command[0]} answered {done.returncode}: {done.stdout!r} {done.stderr!r}"[:400])


def _bubblewrap(rootfs: Path) -> Sequence[str]:
    return (
        *("bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--ro-bind", str(rootfs), "/"),
        *("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *PROGRAM),
    )


def _nspawn(rootfs: Path) -> Sequence[str]:
    return (
        *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--private-users=pick"),
        *("--volatile=overlay", f"--directory={rootfs}", "--bind-ro=/usr", "--pipe", *PROGRAM),
    )


def _oci(runtime: str, rootfs: Path, scratch: Path) -> Sequence[str]:
    """Write a bundle with the runtime's own default specification; return the command that runs it."""
    bundle = scratch / runtime
    bundle.mkdir(exist_ok=True)
    if shutil.which(runtime, path=PATH):
        subprocess.run((runtime, "spec"), cwd=bundle, check=False, capture_output=True, env={"PATH": PATH})
        path = bundle / "config.json"
        if path.exists():
            path.write_text(json.dumps(_own(json.loads(path.read_text()), rootfs)))
    return *_options(runtime, scratch), "run", "--bundle", str(bundle), f"sandkasten-bench-{os.getpid()}"


def _options(runtime: str, scratch: Path) -> Sequence[str]:
    own = {
        "crun": ["--cgroup-manager=disabled"],
        "runsc": ["--platform=ptrace", "--network=none", "--ignore-cgroups"],  # with KVM it may hang
    }
    return runtime, "--root", str(scratch / f"{runtime}-state"), *own.get(runtime, ())


def _podman(rootfs: Path, scratch: Path, runroot: str) -> Sequence[str]:
    return (
        *("podman", f"--root={scratch / 'podman'}", f"--runroot={runroot}", "--storage-driver=vfs"),
        *("--events-backend=none", "--cgroup-manager=cgroupfs", "--runtime=runc", "run", "--rm"),
        *(f"--cgroup-parent=/{_cgroup()}", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"),
        *("--read-only", "--volume=/usr:/usr:ro", "--rootfs", str(rootfs), *PROGRAM),
    )


def _own(spec: dict[str, Any], rootfs: Path) -> dict[str, Any]:  # JSON
    spec["process"] |= {"terminal": False, "args": list(PROGRAM)}
    spec["root"] = {"path": str(rootfs), "readonly": True}
    usr = {"destination": "/usr", "type": "none", "source": "/usr", "options": ["rbind", "ro"]}
    spec["mounts"].insert(0, usr)
    return spec
