"""Mode `loop`: layers lie in an ext4 image of the session's own, mounted in its mount namespace and nowhere else.

Mount and loop device go when the last process of the session is gone, however it ended and whether or not nsinit is
alive: there is nothing to undo. The image is a file in the session's directory, at most as large as the limit.
Sources: ext4(5); loop(4) LO_FLAGS_AUTOCLEAR; Documentation/admin-guide/ext4.rst (noinit_itable, nobarrier, discard).
"""

from __future__ import annotations

import os
from typing import ClassVar

from nsinit.kernel import constants as k
from nsinit.kernel import mounts, stage, syscalls
from nsinit.storage import loop_device
from nsinit.storage.ext4_image import SUFFIX, Templates, name_of
from nsinit.storage.mechanism import DiskFacts, Mechanism, make_layers
from nsinit.storage.paths import Layout
from nsinit.wire.protocol import DiskLimits, DiskMode

_FLAGS = (
    "noinit_itable",  # or a kernel thread would fill every inode table with zeros, on the host's disk
    "nobarrier",  # or each end of a session would wait until its image is on the disk
    "discard",  # what is deleted inside is given back to the host
    "noauto_da_alloc",
)
_POINT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Loop(Mechanism):
    """The mechanism that this module is about."""

    mode: ClassVar[DiskMode] = "loop"
    trial: ClassVar[DiskLimits] = DiskLimits(size_bytes=1 << 20, inodes=64)  # each block is written: it has no extents

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._part_shift = loop_device.read_part_shift()  # `/sys` is out of sight once nsinit has its own mounts

    def open(self) -> None:
        self._templates = Templates.open(self._layout)
        options = "mode=0700,size=64k,nr_inodes=0"
        syscalls.mount("sandkasten", self._devices, "tmpfs", k.MS_NOSUID | k.MS_NOEXEC, options)

    def make(self, place: DiskFacts, limits: DiskLimits) -> None:
        os.mkdir(place.directory, 0o700)
        self._make_image(place, limits)

    def fit(self, place: DiskFacts, limits: DiskLimits) -> None:
        (image,) = _images(place)
        if image != name_of(limits):
            syscalls.umount2(self.layers(place))
            os.unlink(f"{place.directory}/{image}")
            self._make_image(place, limits)

    def layers(self, place: DiskFacts) -> str:
        return f"{place.layout.stage}/{stage.DISK}"

    def abandon(self, place: DiskFacts) -> None:
        """Unlink the image: with no name left, the last unmount writes nothing back to the disk."""
        for image in _images(place):
            os.unlink(f"{place.directory}/{image}")

    @property
    def _devices(self) -> str:
        return f"{self._layout.stage}/{stage.DEVICES}"

    def _make_image(self, place: DiskFacts, limits: DiskLimits) -> None:
        path = f"{place.directory}/{name_of(limits)}"
        self._templates.copy(limits, path)
        image_fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            device_fd, device = loop_device.attach(self._devices, self._part_shift, image_fd)
        finally:
            os.close(image_fd)
        try:
            mount_fd = mount(device)
        finally:
            os.close(device_fd)
        mounts.attach(mount_fd, os.open(self.layers(place), _POINT))
        make_layers(self.layers(place), place.base)


def mount(device: str) -> int:
    """Return a detached mount of the image behind a loop device."""
    fs_fd = syscalls.fsopen("ext4")
    try:
        syscalls.fsconfig_string(fs_fd, "source", device)
        for flag in _FLAGS:
            syscalls.fsconfig_flag(fs_fd, flag)
        return syscalls.fsmount(fs_fd, mounts.NOSUID_NODEV)
    finally:
        os.close(fs_fd)


def _images(place: DiskFacts) -> list[str]:
    try:
        return [name for name in os.listdir(place.directory) if name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []
