"""The kinds of mount a sandbox is made of, each returned as a descriptor of a detached mount, and how to attach one.

No path inside an image is resolved here; targets are descriptors opened by `paths`. A detached mount vanishes with its
descriptor, so a build that fails leaves none.
Sources: fsopen(2), open_tree(2), mount_setattr(2); Documentation/filesystems/{overlayfs,proc,tmpfs,devpts}.rst.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from nsinit.kernel import constants as k
from nsinit.kernel import stage, syscalls

NOSUID_NODEV = k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NODEV
INERT = NOSUID_NODEV | k.MOUNT_ATTR_NOEXEC

_OVERLAY_OPTIONS = {"metacopy": "off", "index": "off", "xino": "off", "redirect_dir": "on"}
"""With `redirect_dir` a session may rename a directory of the image; without, it is told EXDEV (overlayfs.rst,
"Directories with renames"). The kernel then believes `trusted.overlay.redirect` of every layer: the unpacker lets none
into one (`tools/unpack.py`), and a session's programs have no power over such attributes. Nothing is believed of the
content of a file (`metacopy`)."""
_BENEATH = k.RESOLVE_BENEATH | k.RESOLVE_NO_SYMLINKS | k.RESOLVE_NO_XDEV


class ReadOnlyOverlay(Exception):
    """overlayfs could not use its work directory and gave a read-only mount instead of an error."""


@dataclass(frozen=True, slots=True)
class Features:
    """Optional features of this kernel, probed once at start."""

    overlay_by_fd: bool
    """overlayfs takes layers as descriptors (6.13)."""
    idmapped_tmpfs: bool
    """tmpfs can be id-mapped (6.3), so device nodes show root as their owner."""


def clone_idmapped(path: str, userns_fd: int, attributes: int) -> int:
    """Return a clone of the mount at `path`, without those below it, id-mapped by `userns_fd`. No symbolic link is
    followed."""
    # A clone: MOUNT_ATTR_IDMAP is only for a mount that was never attached (mount_setattr(2)).
    tree = syscalls.open_tree(-1, path, k.OPEN_TREE_CLONE | k.AT_SYMLINK_NOFOLLOW)
    return _with_attributes(tree, path, attributes | k.MOUNT_ATTR_IDMAP, userns_fd)


@contextlib.contextmanager
def _layers(paths: tuple[str, ...], userns_fd: int, attributes: int, *, by_fd: bool) -> Iterator[list[int]]:
    """Clone directories, id-mapped, and yield a descriptor of each: of a clone of its own, as a mount point needs it,
    or with `by_fd` those of layers of one store below one clone of that. The kernel waits for all processors wherever a
    clone ends (`namespace_unlock` in fs/namespace.c): with a hundred clones most of a mount is waiting."""
    fds: list[int] = []
    places = [path.rsplit("/", 2) for path in paths]
    stores = {store for store, *_ in places}
    has_one = by_fd and len(stores) == 1 < len(paths)
    try:
        for path in stores if has_one else paths:
            fds.append(clone_idmapped(path, userns_fd, k.MOUNT_ATTR_RDONLY | attributes))
        if not has_one:
            yield fds
            return
        for _, *names in places:
            fds.append(syscalls.openat2(fds[0], "/".join(names), os.O_PATH | os.O_DIRECTORY, resolve=_BENEATH))
        yield fds[1:]
    finally:
        for fd in fds:
            os.close(fd)


def clone(dirfd: int, path: str, attributes: int) -> int:
    """Return a clone of the mount at `path` with attributes added. `path` is nsinit's own, never an image's."""
    flags = k.OPEN_TREE_CLONE | (0 if path else k.AT_EMPTY_PATH)
    tree = syscalls.open_tree(dirfd, path, flags)
    return _with_attributes(tree, path, attributes) if attributes else tree


def _with_attributes(tree: int, path: str, attributes: int, userns_fd: int = 0) -> int:
    try:
        syscalls.mount_setattr(tree, attr_set=attributes, userns_fd=userns_fd)
    except OSError as error:
        os.close(tree)
        error.filename = path
        raise
    return tree


@dataclass(frozen=True, slots=True)
class OverlayParts:
    """One overlay to make: id-mapped lower directories, the topmost first (at most as many as `stage.LOWER`), and
    `<name>`, `<name>-work` of a session directory."""

    lower_paths: tuple[str, ...]
    session_path: str
    name: str
    userns_fd: int


def overlay(layers: OverlayParts, *, features: Features, stage_path: str) -> int:
    """Return an overlay mount.

    Raises:
        ReadOnlyOverlay: the file system can't be an upper layer.
    """
    by_fd = features.overlay_by_fd
    session_fd = clone(-1, layers.session_path, NOSUID_NODEV)
    try:
        with _layers(layers.lower_paths, layers.userns_fd, NOSUID_NODEV, by_fd=by_fd) as lower_fds:
            if by_fd:
                mount_fd = _overlay_by_fd(lower_fds, session_fd, layers.name)
            else:
                mount_fd = _overlay_by_path(lower_fds, session_fd, layers.name, stage_path)
    finally:
        os.close(session_fd)
    # overlayfs mounts read-only, with no more than a line in the kernel's log, when its work directory is unusable.
    if os.fstatvfs(mount_fd).f_flag & os.ST_RDONLY:
        os.close(mount_fd)
        raise ReadOnlyOverlay(f"{layers.session_path}: this file system can't be the upper layer of an overlay")
    return mount_fd


def view(lower_paths: tuple[str, ...], userns_fd: int, *, features: Features, stage_path: str) -> int:
    """Return a read-only mount of id-mapped layers, the topmost first, as a session sees them that has not written. Of
    one layer it is the layer itself, whiteouts included: an overlay without an upper layer takes two at least."""
    with _layers(lower_paths, userns_fd, INERT, by_fd=features.overlay_by_fd) as lower_fds:
        if len(lower_fds) == 1:
            return os.dup(lower_fds[0])
        if not features.overlay_by_fd:
            return _overlay_by_path(lower_fds, None, "", stage_path)
        fs_fd = syscalls.fsopen("overlay")
        try:
            for lower_fd in lower_fds:
                syscalls.fsconfig_fd(fs_fd, "lowerdir+", lower_fd)
            for key, value in _OVERLAY_OPTIONS.items():
                syscalls.fsconfig_string(fs_fd, key, value)
            return syscalls.fsmount(fs_fd, INERT)
        finally:
            os.close(fs_fd)


def _overlay_by_fd(lower_fds: list[int], session_fd: int, name: str) -> int:
    """Give the layers as descriptors of detached clones: no host path shows in the sandbox's mount table."""
    fs_fd = syscalls.fsopen("overlay")
    upper_fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=session_fd)
    work_fd = os.open(f"{name}-work", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=session_fd)
    try:
        syscalls.fsconfig_string(fs_fd, "source", "sandkasten")  # the name that /proc/mounts shows
        for lower_fd in lower_fds:
            syscalls.fsconfig_fd(fs_fd, "lowerdir+", lower_fd)
        syscalls.fsconfig_fd(fs_fd, "upperdir", upper_fd)
        syscalls.fsconfig_fd(fs_fd, "workdir", work_fd)
        for key, value in _OVERLAY_OPTIONS.items():
            syscalls.fsconfig_string(fs_fd, key, value)
        # volatile: no sync of the upper layer ever, and a session's layers are never used again after a crash.
        syscalls.fsconfig_flag(fs_fd, "volatile")
        return syscalls.fsmount(fs_fd, NOSUID_NODEV)
    finally:
        for fd in (fs_fd, upper_fd, work_fd):
            os.close(fd)


def _overlay_by_path(lower_fds: list[int], session_fd: int | None, name: str, stage_path: str) -> int:
    """Give the layers as relative paths on the stage, for kernels before 6.13: the names show in the sandbox's mount
    table. Without `session_fd` there is no upper layer."""
    # In a clone of the stage, which ends with all that is mounted in it: each end alone would be a wait (`_layers`).
    around = f"{stage_path}/{stage.STAGED_ROOT}"
    attach(clone(-1, stage_path, 0), os.open(around, os.O_PATH | os.O_DIRECTORY))
    os.chdir(around)
    try:
        lowers = stage.LOWER[: len(lower_fds)]
        staged = list(zip(lower_fds, lowers, strict=True))
        layers = {"lowerdir": ":".join(lowers)} | _OVERLAY_OPTIONS
        flags = []
        if session_fd is not None:
            staged.insert(0, (session_fd, stage.UPPER))
            layers |= {"upperdir": f"{stage.UPPER}/{name}", "workdir": f"{stage.UPPER}/{name}-work"}
            flags.append("volatile")
        for layer_fd, point in staged:
            target_fd = os.open(point, os.O_PATH | os.O_DIRECTORY)
            syscalls.move_mount(layer_fd, target_fd)
            os.close(target_fd)
        options = [*(f"{key}={value}" for key, value in layers.items()), *flags]
        syscalls.mount("sandkasten", stage.STAGED_ROOT, "overlay", k.MS_NOSUID | k.MS_NODEV, ",".join(options))
        # The overlay holds its layers by itself: once it is cloned, the staged mounts can go.
        return syscalls.open_tree(k.AT_FDCWD, stage.STAGED_ROOT, k.OPEN_TREE_CLONE)
    finally:
        os.chdir("/")
        syscalls.umount2(around, k.MNT_DETACH)


def filesystem(fstype: str, attributes: int, **options: str | int) -> int:
    """Return a new mount of a virtual file system."""
    fs_fd = syscalls.fsopen(fstype)
    try:
        for key, value in options.items():
            syscalls.fsconfig_string(fs_fd, key, str(value))
        return syscalls.fsmount(fs_fd, attributes)
    finally:
        os.close(fs_fd)


def attach(mount_fd: int, target_fd: int) -> None:
    """Attach a detached mount on an opened target and close both."""
    try:
        syscalls.move_mount(mount_fd, target_fd)
    finally:
        os.close(mount_fd)
        os.close(target_fd)


def probe_features(stage_path: str, userns_fd: int) -> Features:
    """Probe the kernel with mounts that are thrown away."""
    return Features(_takes_layers_by_fd(stage_path), _takes_idmapped_tmpfs(stage_path, userns_fd))


def _takes_layers_by_fd(stage_path: str) -> bool:
    fs_fd = syscalls.fsopen("overlay")
    layer_fd = syscalls.open_tree(-1, f"{stage_path}/{stage.EMPTY_DIRECTORY}", k.OPEN_TREE_CLONE)
    try:
        syscalls.fsconfig_fd(fs_fd, "lowerdir+", layer_fd)
    except OSError:
        return False
    finally:
        os.close(fs_fd)
        os.close(layer_fd)
    return True


def _takes_idmapped_tmpfs(stage_path: str, userns_fd: int) -> bool:
    try:
        os.close(clone_idmapped(f"{stage_path}/{stage.DEV}", userns_fd, 0))
    except OSError:
        return False
    return True
