"""Try on a throw-away directory what building a sandbox needs: `python -I -S -B probe.py DIRECTORY`, answer on stdout.

A short-lived process: what it mounts lives in a mount namespace of its own, what it writes in one directory that it
removes. Uses the calls of the real build, so a machine that passes here fails there only for reasons of the session.
The answer is one JSON object: check name to {"ok", "detail"}; a check that needs a failed one is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from nsinit import cgroup_tree, mounts, slots, stage, syscalls
from nsinit import constants as k
from nsinit.mountinfo import parse_mountinfo, parse_own_cgroups

_NAMESPACES = k.CLONE_NEWNS | k.CLONE_NEWPID | k.CLONE_NEWUTS | k.CLONE_NEWIPC | k.CLONE_NEWNET


def main() -> None:
    """Run the checks in order and print what they found."""
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=sys.argv[1]) as directory:
        try:
            results = _run(directory)
        finally:
            if os.path.ismount(f"{directory}/stage"):
                syscalls.umount2(f"{directory}/stage", k.MNT_DETACH)
            shutil.rmtree(f"{directory}/session", ignore_errors=True)  # overlayfs leaves a directory of mode 000
    print(json.dumps(results))


def _run(directory: str) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}

    def check(name: str, probe: Callable[[], str]) -> None:
        try:
            results[name] = {"ok": True, "detail": probe()}
        except Exception as error:  # noqa: BLE001  # whatever goes wrong is the finding
            results[name] = {"ok": False, "detail": str(error)}

    check("cgroups", _cgroups)
    check("openat2", _openat2)
    check("clone3", _clone3)
    check("mounts", lambda: _own_mounts(directory))
    if results["mounts"]["ok"]:
        check("overlay", lambda: _overlay(directory))
    return results


def _cgroups() -> str:
    with open("/proc/self/mountinfo", "rb") as info, open("/proc/self/cgroup", "rb") as own:
        located = cgroup_tree.locate(
            parse_mountinfo(os.fsdecode(info.read())), parse_own_cgroups(os.fsdecode(own.read()))
        )
    controllers: frozenset[str] = frozenset()
    if located.unified:
        with open(f"{located.unified}/cgroup.controllers") as file:
            controllers = frozenset(file.read().split())
    return f"mode {cgroup_tree.choose(located, controllers)}"


def _openat2() -> str:
    os.close(syscalls.openat2(k.AT_FDCWD, "/", os.O_PATH, resolve=k.RESOLVE_NO_SYMLINKS))
    return "paths in images can be resolved without leaving them"


def _clone3() -> str:
    pid, pidfd = syscalls.clone3(_NAMESPACES)
    if pid == 0:
        os._exit(0)
    os.close(pidfd)
    os.waitpid(pid, 0)
    return "processes can be started in new namespaces"


def _own_mounts(directory: str) -> str:
    syscalls.unshare(k.CLONE_NEWNS)
    syscalls.mount("", "/", "", k.MS_REC | k.MS_PRIVATE)
    os.mkdir(f"{directory}/stage")
    stage.make_stage(f"{directory}/stage")
    return "file systems and device nodes can be made"


def _overlay(directory: str) -> str:
    for name in ("lower", "session", "session/root", "session/root-work"):
        os.mkdir(f"{directory}/{name}")
    os.mkdir(f"{directory}/lower/below")
    userns_fd = slots.make_id_map(f"0 {slots.FIRST_BASE} {slots.SIZE}\n")
    features = mounts.probe_features(f"{directory}/stage", userns_fd)
    layers = mounts.Layers((f"{directory}/lower",), f"{directory}/session", "root", userns_fd)
    mount_fd = mounts.overlay(layers, features=features, stage_path=f"{directory}/stage")
    try:
        owner = os.stat("below", dir_fd=mount_fd).st_uid
        os.mkdir("above", dir_fd=mount_fd)
    finally:
        os.close(mount_fd)
    if owner != slots.FIRST_BASE:
        raise OSError(0, f"the lower layer's ids are not mapped (found {owner})")
    return "a writable layer over an id-mapped one works here" + ("" if features.overlay_by_fd else ", by path")


if __name__ == "__main__":
    main()
