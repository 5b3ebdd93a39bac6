"""Try on a throw-away directory what building a sandbox needs: `python -I -S -B probe.py DIRECTORY`, answer on stdout.

A short-lived process: what it mounts lives in a mount namespace of its own, what it writes in one directory that it
removes. Uses the calls of the real build, so a machine that passes here fails there only for reasons of the session.
The answer is one JSON object: check name to {"ok", "detail"}; a check that needs a failed one is left out.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import NoReturn

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from nsinit import cgroup_tree, mounts, slots, stage, syscalls
from nsinit import constants as k
from nsinit.mountinfo import parse_mountinfo, parse_own_cgroups
from nsinit.seccomp.filters import prepare
from nsinit.seccomp.profiles import STRICT

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
    check("seccomp", _seccomp)
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


def _seccomp() -> str:
    """Put a child under the default filter: what it refuses is refused, the rest goes on."""
    filters = prepare()
    program = filters.programs[filters.number(STRICT.name)]
    assert program is not None
    pid = os.fork()
    if pid == 0:
        _end_by_filter(program)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise OSError(status, os.strerror(abs(status)))
    return "a process was put under the filter of sandboxes, and it held"


def _end_by_filter(program: syscalls.FilterProgram) -> NoReturn:
    """The child: 0 if a call that is allowed without the filter is refused under it, else an errno."""
    try:
        syscalls.unshare(0)
        syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.set_filter(program)
    except OSError as error:
        os._exit(error.errno or 1)
    try:
        syscalls.unshare(0)
    except PermissionError:
        os._exit(0)
    finally:
        os._exit(errno.EINVAL)


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
