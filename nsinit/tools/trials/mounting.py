"""Trials of the parts of a root filesystem: mount calls, overlayfs, tmpfs, proc, devpts, pivot_root.

All happen in a mount namespace of the trials' own; after `proc` and `pivot_root` a process can make no further trial.
Sources: fsopen(2), mount_setattr(2), pivot_root(2); Documentation/filesystems/{overlayfs,proc,tmpfs,devpts}.rst.
"""

from __future__ import annotations

import os

from nsinit.kernel import constants as k
from nsinit.kernel import mounts, slots, stage, syscalls
from nsinit.tools.trials.attempt import FallsBack, Room, Seen


def mount_calls(room: Room) -> str:
    _enter_own_mounts(room)
    tree = mounts.clone(-1, f"{_stage(room)}/{stage.DEV}", k.MOUNT_ATTR_RDONLY)
    os.close(tree)
    return "made file systems, device nodes and read-only clones of them"


def overlay(room: Room) -> Seen:
    """Try a writable layer over an id-mapped one, on the file system of the data directory."""
    _enter_own_mounts(room)
    base = f"{room.directory}/layers"
    for name in ("", "/lower", "/lower/below", "/session", "/session/root", "/session/root-work"):
        os.makedirs(f"{base}{name}", exist_ok=True)
    userns_fd = slots.make_id_map(f"0 {slots.FIRST_BASE} {slots.SIZE}\n")
    features = mounts.probe_features(_stage(room), userns_fd)
    layers = mounts.OverlayParts((f"{base}/lower",), f"{base}/session", "root", userns_fd)
    mount_fd = mounts.overlay(layers, features=features, stage_path=_stage(room))
    owner = os.stat("below", dir_fd=mount_fd).st_uid
    os.mkdir("above", dir_fd=mount_fd)
    os.close(mount_fd)
    if owner != slots.FIRST_BASE:
        raise OSError(0, f"the lower layer's ids are not mapped (found {owner})")
    facts: dict[str, object] = {"overlay_by_fd": features.overlay_by_fd, "idmapped_tmpfs": features.idmapped_tmpfs}
    return Seen("wrote into a layer over an id-mapped one", facts)


def overlay_by_descriptor(room: Room) -> str:
    _enter_own_mounts(room)
    if not mounts.probe_features(_stage(room), _any_map()).overlay_by_fd:
        raise FallsBack("layers are given by path")
    return "overlayfs took a layer as a descriptor"


def mapped_tmpfs(room: Room) -> str:
    _enter_own_mounts(room)
    if not mounts.probe_features(_stage(room), _any_map()).idmapped_tmpfs:
        raise FallsBack("tmpfs can't be id-mapped")
    return "id-mapped a tmpfs"


def tmpfs(room: Room) -> str:
    """Try a tmpfs with a size and a number of inodes, both of which must hold."""
    _enter_own_mounts(room)
    os.fchdir(mounts.filesystem("tmpfs", mounts.INERT, size="65536", nr_inodes=8))
    try:
        for number in range(8):
            os.close(os.open(f"file-{number}", os.O_CREAT | os.O_WRONLY))
    except OSError:
        fd = os.open("file-0", os.O_WRONLY)
        if os.write(fd, bytes(1 << 20)) < 1 << 20:
            return "neither its bytes nor its inodes could be exceeded"
    raise OSError(0, "a limit of its size did not hold")


def proc(room: Room) -> str:
    """Try a proc in a pid namespace of its own, with the processes of other users hidden."""
    _enter_own_mounts(room)
    syscalls.unshare(k.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        _look_at_proc(f"{_stage(room)}/{stage.PROC}")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise OSError(status if status > 0 else 0, "a proc with hidepid=invisible: " + os.strerror(abs(status)))
    return "mounted a proc of its own in which a stranger saw no process but itself"


def _look_at_proc(path: str) -> None:
    """PID 1 of the namespace. Never returns; the status is an errno."""
    try:
        syscalls.mount("proc", path, "proc", k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC, "hidepid=invisible")
        pid = os.fork()
        if pid == 0:
            os.setresuid(slots.FIRST_BASE, slots.FIRST_BASE, slots.FIRST_BASE)
            os._exit(1 if os.path.exists(f"{path}/1") else 0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    except OSError as error:
        os._exit(error.errno or 255)
    finally:
        os._exit(255)


def devpts(room: Room) -> str:
    _enter_own_mounts(room)
    os.fchdir(mounts.filesystem("devpts", k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NOEXEC, mode="620", ptmxmode="666"))
    os.close(os.open("ptmx", os.O_RDWR | os.O_NOCTTY))
    return "opened a terminal in a devpts of its own"


def pivot_root(room: Room) -> str:
    _enter_own_mounts(room)
    root_fd = mounts.filesystem("tmpfs", 0, size="65536")
    target = f"{_stage(room)}/{stage.ROOT}"
    syscalls.move_mount(root_fd, os.open(target, os.O_PATH | os.O_DIRECTORY))
    os.chdir(target)
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", k.MNT_DETACH)
    if os.listdir("/"):
        raise OSError(0, "the old root is still there")
    return "left the old root behind"


def _any_map() -> int:
    return slots.make_id_map(f"0 {slots.FIRST_BASE} {slots.SIZE}\n")


def _stage(room: Room) -> str:
    return f"{room.directory}/stage"


def _enter_own_mounts(room: Room) -> None:
    """Enter a mount namespace, once for all trials of a process."""
    if os.path.ismount(_stage(room)):
        return
    syscalls.unshare(k.CLONE_NEWNS)
    syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)
    os.makedirs(_stage(room), exist_ok=True)
    stage.make_stage(_stage(room))
