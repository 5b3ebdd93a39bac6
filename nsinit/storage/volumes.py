"""Volumes: workspaces with a quota. Each is an ext4 image of its own, mounted only where it is used.

A volume is a directory of root's, `<data_dir>/volumes/<id>`, out of every sandbox's reach, with the image in it;
clients see one directory inside the image. No process keeps a volume mounted: a builder mounts it in the sandbox's
mount namespace, so mount and loop device go with the last sandbox, however that ended, and there is nothing to undo or
to find again after a crash. Two loop devices of one image would be two file systems that overwrite each other. So the
device that an image has is always taken again, and a lock is held during the search. There is a journal and there are
barriers: after fsync(2) inside has returned, the data is on the host's disk.
Sources: loop(4); ext4(5); resize2fs(8); fsopen(2); flock(2).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from dataclasses import dataclass, field

from nsinit.kernel import constants as k
from nsinit.kernel import mounts, stage, syscalls
from nsinit.kernel.slots import SANDBOX_ID
from nsinit.log import log
from nsinit.steps import Crash, StepFailed, passing
from nsinit.storage import choose, loop_device
from nsinit.storage.ext4_image import copy_sparse, enlarge, find_tool, make_image, read_size
from nsinit.storage.loop import Loop
from nsinit.storage.mechanism import MechanismUnavailable
from nsinit.storage.paths import Layout, sync_directory
from nsinit.wire.protocol import DiskLimits, DiskMode

STAGE = "volume"
IMAGE = "image"
_FILES, _COPY = "files", "copy"
_UNFINISHED = "+new-"
"""A prefix that no workspace id has."""
_FLAGS = ("noinit_itable", "discard")
"""The inode tables are not filled with zeros on the host's disk; blocks deleted inside are given back to it."""
_RESERVED_INODES = 11
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_POINT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNMOUNT_TRIES, _UNMOUNT_PAUSE_S = 200, 0.01


@dataclass(slots=True)
class Volumes:
    """The volumes of one data directory. `blocks_fd`: `/sys/block`, borrowed, -1 without; `refused`: why none can be
    made."""

    layout: Layout
    blocks_fd: int
    refused: str = "not tried yet"
    _mke2fs: str = ""
    _loop: Loop = field(init=False)
    _part_shift: int = field(init=False)

    def __post_init__(self) -> None:
        """Called while the whole machine is in sight; must not fail."""
        self._loop = Loop(self.layout)
        self._part_shift = loop_device.read_part_shift()

    def open(self, mode: DiskMode, refused: dict[str, str]) -> None:
        """Find out, once, whether images can be mounted; disks of mode `loop` have shown so already."""
        try:
            if self.blocks_fd < 0:
                raise MechanismUnavailable("/sys/block can't be seen")
            if "loop" in refused:
                raise MechanismUnavailable(refused["loop"])
            self._mke2fs = find_tool("mke2fs")
            if mode != Loop.mode:
                self._loop.open()
                choose.attempt(self.layout, self._loop)
        except (MechanismUnavailable, OSError, StepFailed) as error:
            self.refused = str(error)
        else:
            self.refused = ""

    @property
    def kept_fds(self) -> frozenset[int]:
        """The descriptors that a process which mounts volumes must not close."""
        return frozenset({self.blocks_fd} - {-1})

    def require(self) -> None:
        """Raise `StepFailed` (`EOPNOTSUPP`) where no volume can be made."""
        if self.refused:
            raise StepFailed(STAGE, f"quotas can't be had here: {self.refused}", errno=errno.EOPNOTSUPP)

    def has(self, workspace_id: str, *, draft: bool = False) -> bool:
        """Whether a workspace has a file system of its own."""
        return os.path.isdir(self.layout.volume(workspace_id, draft=draft))

    def quota_of(self, workspace_id: str) -> DiskLimits | None:
        """Return the quota of a workspace, None if it is no volume. Raises `OSError` when its image is damaged."""
        return limits_of(self.layout.volume(workspace_id)) if self.has(workspace_id) else None

    # In a process with a mount namespace of its own ------------------------------------------------------------

    def mount(self, directory: str) -> str:
        """Mount a volume on the stage of this mount namespace; return the directory of the workspace's files."""
        directory_fd = os.open(directory, _DIRECTORY)
        try:
            fcntl.flock(directory_fd, fcntl.LOCK_EX)
            image_fd = os.open(IMAGE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
            try:
                device_fd, number = self._device_of(image_fd)
            finally:
                os.close(image_fd)
            try:
                mount_fd = self._mount_device(number)
            finally:
                os.close(device_fd)
        finally:
            os.close(directory_fd)
        mounts.attach(mount_fd, os.open(self._point, _POINT))
        return f"{self._point}/{_FILES}"

    def make(self, workspace_id: str, limits: DiskLimits, crash: Crash | None, *, draft: bool) -> None:
        """Make a volume. It gets its name when all of it is on the disk."""
        _leave_mounts()
        new = f"{self.layout.volume_drafts}/{_UNFINISHED}{os.urandom(8).hex()}"
        os.mkdir(new, 0o700)
        made = DiskLimits(_whole_blocks(limits.size_bytes), limits.inodes + _RESERVED_INODES)
        make_image(self._mke2fs, made, f"{new}/{IMAGE}", has_journal=True)
        files = self.mount(new)
        os.mkdir(files, 0o755)
        os.chown(files, SANDBOX_ID, SANDBOX_ID)
        self._sync_mounted()
        syscalls.umount2(self._point)
        sync_directory(new)
        passing(crash, "nsinit.volume.formatted")
        syscalls.renameat2(new, self.layout.volume(workspace_id, draft=draft), k.RENAME_NOREPLACE)
        sync_directory(os.path.dirname(self.layout.volume(workspace_id, draft=draft)))

    def sync(self, directory: str) -> None:
        """Wait until all data written to a volume is on the disk, through whichever mount."""
        _leave_mounts()
        self.mount(directory)
        self._sync_mounted()

    def grow(self, workspace_id: str, size_bytes: int, crash: Crash | None) -> None:
        """Enlarge a volume that is mounted nowhere. A copy is enlarged and takes its place in one step, so the volume
        is whole at any moment. (Online it takes CAP_SYS_RESOURCE, which nsinit may lack.)

        Raises:
            OSError: `EINVAL`: the volume is larger already; `EBUSY`: a sandbox has it mounted.
        """
        directory = self.layout.volume(workspace_id)
        size = _whole_blocks(size_bytes)
        if size < limits_of(directory).size_bytes:
            raise OSError(errno.EINVAL, "a volume can't be made smaller", directory)
        new, image = f"{directory}/{_COPY}", f"{directory}/{IMAGE}"
        directory_fd = os.open(directory, _DIRECTORY)
        try:
            fcntl.flock(directory_fd, fcntl.LOCK_EX)
            with open(image, "rb") as source:
                self._wait_unmounted(source.fileno())
                if os.path.lexists(new):  # of one that was cut short
                    os.unlink(new)
                copy_sparse(source.fileno(), new)
            enlarge(new, size)
            passing(crash, "nsinit.volume.enlarged")
            os.rename(new, image)
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)

    def discard_copies(self) -> None:
        """Delete copies that were to become larger volumes. Called when none is being made."""
        for name in os.listdir(self.layout.volumes):
            path = f"{self.layout.volumes}/{name}/{_COPY}"
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                pass  # there is none
            except OSError as error:
                log("error", "a copy of a volume stays", path=path, reason=str(error))

    def _wait_unmounted(self, image_fd: int) -> None:
        """Wait until a volume is mounted nowhere: the mounts of a sandbox go a moment after its last process."""
        for _ in range(_UNMOUNT_TRIES):
            device_fd = self._found_device(image_fd)
            if device_fd is None:
                return
            os.close(device_fd[0])
            time.sleep(_UNMOUNT_PAUSE_S)
        raise OSError(errno.EBUSY, "somebody has the volume mounted")

    @property
    def _point(self) -> str:
        return f"{self.layout.stage}/{stage.VOLUME}"

    @property
    def _devices(self) -> str:
        return f"{self.layout.stage}/{stage.DEVICES}"

    def _device_of(self, image_fd: int) -> tuple[int, int]:
        """Return the one device of an image, open, and its number; the caller has the lock."""
        if (found := self._found_device(image_fd)) is not None:
            return found
        device_fd, path = loop_device.attach(self._devices, self._part_shift, image_fd)
        return device_fd, int(os.path.basename(path))

    def _found_device(self, image_fd: int) -> tuple[int, int] | None:
        for number, path in loop_device.backed(self.blocks_fd):
            if path.endswith(f"/{IMAGE}"):
                device_fd = loop_device.open_of(self._devices, self._part_shift, number, image_fd)
                if device_fd is not None:
                    return device_fd, number
        return None

    def _mount_device(self, number: int) -> int:
        """Return a mount of a device; a second mount of a device shows the same file system. The device's name shows in
        the sandbox's mount table, so it has no directory."""
        os.chdir(self._devices)
        fs_fd = syscalls.fsopen("ext4")
        try:
            syscalls.fsconfig_string(fs_fd, "source", str(number))
            for flag in _FLAGS:
                syscalls.fsconfig_flag(fs_fd, flag)
            syscalls.fsconfig_string(fs_fd, "errors", "remount-ro")
            return syscalls.fsmount(fs_fd, mounts.NOSUID_NODEV)
        finally:
            os.close(fs_fd)
            os.chdir("/")

    def _sync_mounted(self) -> None:
        fd = os.open(self._point, _DIRECTORY)
        syscalls.syncfs(fd)
        os.close(fd)


def limits_of(directory: str) -> DiskLimits:
    """Return the quota that a volume was made for, or enlarged to. Raises `OSError` (`EUCLEAN`) when its image is
    damaged."""
    with open(f"{directory}/{IMAGE}", "rb") as image:
        made = read_size(image.fileno())
    return DiskLimits(made.size_bytes, made.inodes - _RESERVED_INODES)


def _whole_blocks(size_bytes: int) -> int:
    return size_bytes // k.EXT4_BLOCK_BYTES * k.EXT4_BLOCK_BYTES


def _leave_mounts() -> None:
    """Enter a mount namespace of this process's own: neither nsinit nor a sandbox made meanwhile gets the mounts to
    come."""
    syscalls.unshare(k.CLONE_NEWNS)
    syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)
