"""Loop devices: an image file as a block device that vanishes with its last user.

Owns the device nodes nsinit uses, on a tmpfs that only its own mount namespace and unfinished sandboxes have: the
machine's `/dev` may lack nodes (a container's does), and nsinit changes nothing in it.
Sources: loop(4); include/uapi/linux/loop.h; Documentation/admin-guide/devices.txt.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator

from nsinit.kernel import constants as k
from nsinit.kernel import stage, syscalls
from nsinit.storage.paths import Layout

_CONFIG = struct.Struct("=II 52xI 176x 64x")
"""`struct loop_config`: the file, block size (0: as the file system wants), then of `struct loop_info64` the flags."""
_STATUS_BYTES, _BEHIND = 232, struct.Struct("=2Q")
"""`struct loop_info64`: device and inode of the file, and more."""
_ATTEMPTS = 64
_MAX_PART = "/sys/module/loop/parameters/max_part"


def read_part_shift() -> int:
    """Return by how many bits a loop device's number is shifted in its minor number."""
    try:
        with open(_MAX_PART, "rb") as file:
            return int(file.read()).bit_length()
    except OSError:
        return 0  # the driver is loaded by the first use, with its default; a wrong one fails the trial


def backed(blocks_fd: int) -> Iterator[tuple[int, str]]:
    """Yield number and file of every loop device that has a file. `blocks_fd`: `/sys/block`."""
    for name in os.listdir(f"/proc/self/fd/{blocks_fd}"):
        number = name.removeprefix("loop")
        if name.startswith("loop") and number.isdigit() and (path := _file_of(blocks_fd, int(number))):
            yield int(number), path


def _file_of(blocks_fd: int, number: int) -> str:
    """Return the path of a device's file, empty without one."""
    try:
        fd = os.open(f"loop{number}/loop/backing_file", os.O_RDONLY | os.O_CLOEXEC, dir_fd=blocks_fd)
        with open(fd, "rb") as file:
            return os.fsdecode(file.read().rstrip(b"\n")).removesuffix(" (deleted)")
    except OSError:
        return ""  # the device has no file, or lost it after the open (ENODEV)


def open_image(layout: Layout, part_shift: int, blocks_fd: int, number: int) -> int | None:
    """Open a device if its file is the image of a session or a volume of a data directory. None: it is another file.

    The kernel tells a file's path from the root of its mount on, and knows no more of it when that mount is gone: so
    the last two parts are looked up where images are, through no link, and the file that is found is compared.
    """
    place = "/".join(_file_of(blocks_fd, number).split("/")[-2:])
    for parent in (layout.sessions, layout.volumes, layout.volume_drafts):
        try:
            image_fd = syscalls.openat2(k.AT_FDCWD, f"{parent}/{place}", os.O_PATH, resolve=k.RESOLVE_NO_SYMLINKS)
        except OSError:
            continue
        try:
            return open_of(f"{layout.stage}/{stage.DEVICES}", part_shift, number, image_fd)
        finally:
            os.close(image_fd)
    return None


def open_of(directory: str, part_shift: int, number: int, image_fd: int) -> int | None:
    """Open a device if the file `image_fd` is behind it, which keeps it from vanishing. None: another file
    is, or none."""
    device_fd = _open_node(f"{directory}/{number}", stat.S_IFBLK, os.makedev(k.LOOP_MAJOR, number << part_shift))
    try:
        status = bytearray(_STATUS_BYTES)
        fcntl.ioctl(device_fd, k.LOOP_GET_STATUS64, status)
        image = os.fstat(image_fd)
        if _BEHIND.unpack_from(status) == (image.st_dev, image.st_ino):
            return device_fd
    except OSError as error:
        if error.errno != errno.ENXIO:
            os.close(device_fd)
            raise
    os.close(device_fd)
    return None


def detach(directory: str, blocks_fd: int, number: int) -> None:
    """Detach a device from its file; while the device is in use the kernel waits for its last user.

    The device node is made in `directory` and unlinked again.
    """
    path = f"{directory}/loop-{number}"
    with open(os.open(f"loop{number}/dev", os.O_RDONLY | os.O_CLOEXEC, dir_fd=blocks_fd), "rb") as file:
        major, _, minor = file.read().partition(b":")
    fd = _open_node(path, stat.S_IFBLK, os.makedev(int(major), int(minor)))
    try:
        os.unlink(path)
        fcntl.ioctl(fd, k.LOOP_CLR_FD)
    finally:
        os.close(fd)


def attach(directory: str, part_shift: int, image_fd: int) -> tuple[int, str]:
    """Make the file `image_fd` a block device; return it open, and its path. It vanishes when its last user is gone.

    Between the question for a free device and LOOP_CONFIGURE another process of the machine may take the device; then
    the next free one is tried.
    """
    control_fd = _open_node(f"{directory}/control", stat.S_IFCHR, os.makedev(k.MISC_MAJOR, k.LOOP_CTRL_MINOR))
    try:
        for _ in range(_ATTEMPTS):
            number = fcntl.ioctl(control_fd, k.LOOP_CTL_GET_FREE)
            path = f"{directory}/{number}"
            device_fd = _open_node(path, stat.S_IFBLK, os.makedev(k.LOOP_MAJOR, number << part_shift))
            if _configure(device_fd, image_fd):
                return device_fd, path
            os.close(device_fd)
    finally:
        os.close(control_fd)
    raise OSError(errno.EBUSY, "loop: others took every free device", directory)


def _configure(device_fd: int, image_fd: int) -> bool:
    try:
        fcntl.ioctl(device_fd, k.LOOP_CONFIGURE, _CONFIG.pack(image_fd, 0, k.LO_FLAGS_AUTOCLEAR))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        os.close(device_fd)
        raise
    return True


def _open_node(path: str, kind: int, device: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        pass
    try:
        os.mknod(path, kind | 0o600, device)
    except FileExistsError:
        pass  # another builder was quicker
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
