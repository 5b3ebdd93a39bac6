"""bubblewrap and runc starting `bash -c true` on the same root file system, with their exact commands."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path


class Rival:
    """A program to compare with. `reason` is why it can't be measured, or empty."""

    def __init__(self, name: str, command: list[str], cwd: Path) -> None:
        self.name, self.command, self._cwd = name, command, cwd
        self.reason = "" if shutil.which(command[0], path=_PATH) else f"{command[0]} is not installed"
        if not self.reason:
            done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
            self.reason = done.stderr.strip() if done.returncode else ""

    def run(self) -> None:
        """Start the rival once and wait for its end."""
        subprocess.run(self.command, cwd=self._cwd, stdout=subprocess.DEVNULL, check=True)


_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def bubblewrap(rootfs: Path, scratch: Path) -> Rival:
    """bubblewrap with all namespaces, the same root, own /proc, /dev and /tmp."""
    command = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        str(rootfs),
        "/",
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "bash", "-c", "true"]
    return Rival("bwrap", command, scratch)


def runc(rootfs: Path, scratch: Path) -> Rival:
    """runc's own default specification, with the same root and program and no terminal."""
    bundle = scratch / "runc"
    bundle.mkdir()
    command = ["runc", "run", "--bundle", str(bundle), "sandkasten-bench"]
    if shutil.which("runc", path=_PATH):
        subprocess.run(["runc", "spec"], cwd=bundle, check=True)
        path = bundle / "config.json"
        spec = json.loads(path.read_text())
        spec["process"] |= {"terminal": False, "args": ["bash", "-c", "true"]}
        spec["root"] = {"path": str(rootfs), "readonly": True}
        usr = {"destination": "/usr", "type": "none", "source": "/usr", "options": ["rbind", "ro"]}
        spec["mounts"].insert(0, usr)
        path.write_text(json.dumps(spec))
    return Rival("runc", command, bundle)
