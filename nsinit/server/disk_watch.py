"""The watch over the disk below images: a full one is "no space left" inside, not a loss.

A session's disk of mode `loop`, and a workspace with a quota, is a sparse file, and its file system believes in blocks
that the machine's disk may not have. A program writes to memory, and is told that all is well; when the kernel brings
the data to the loop device later and finds no room, data and tables of the image are lost, those that fsync(2) has
returned for among them. So while the machine's disk has less free than a floor, every image is told to keep its free
blocks: ext4 then refuses each new block at once, with ENOSPC, and shows none free. What programs had written by then
has the floor's room to go to. Blocks that a file has already can be written as before.

What is on its way to a disk is counted as there. Looks are as frequent as it takes for all processors together to write
half of the floor in between.

Sources: Documentation/ABI/testing/sysfs-fs-ext4 (reserved_clusters); fs/ext4/balloc.c, ext4_has_free_clusters;
fs/ext4/super.c, ext4_statfs, ext4_calculate_resv_clusters; proc_meminfo(5) Dirty, Writeback; loop(4).
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from dataclasses import dataclass, field

from nsinit.cgroup.session import read_file
from nsinit.kernel import constants as k
from nsinit.log import log
from nsinit.scheduler import Wait
from nsinit.storage import loop_device
from nsinit.storage.ext4_image import read_size
from nsinit.storage.paths import Layout

_BYTES_PER_PROCESSOR_S = 2 << 30
"""The most that one processor writes to memory in a second, through an overlay."""
_LEAST_S, _MOST_S = 0.01, 1.0
_BACK = 1.25
"""Multiple of the floor at which images may take blocks again."""
_USUAL_PART, _USUAL_MOST = 50, 4096
"""The part of an image's blocks, and the most of them, that ext4 keeps when it is mounted with extents. An image
without them gives up as much when it was held once."""
_IMAGES_AT_ONCE = 64
_LOOP = re.compile("loop[0-9]+")


@dataclass(slots=True)
class DiskWatch:
    """The disk of a data directory, whose images keep their free blocks while less than `floor_bytes` is free,
    half of the disk at most.

    `blocks_fd`: `/sys/block`, borrowed; `ext4_fd`: `/sys/fs/ext4` (O_PATH); -1 without, and then images are not held.
    """

    layout: Layout
    blocks_fd: int
    ext4_fd: int
    meminfo_fd: int
    part_shift: int
    floor_bytes: int
    _is_holding: bool = True
    """Whether images may keep more than usual: an earlier nsinit may have told them to."""
    _told: dict[str, int] = field(default_factory=dict)
    """The number of blocks that each image was told to keep, by the name of its device. Another mount keeps another."""
    _untold: set[str] = field(default_factory=set)
    """Devices whose images could not be told."""

    @classmethod
    def open(cls, layout: Layout, blocks_fd: int, floor_bytes: int) -> DiskWatch:
        """Open what is needed, while `/sys` is in sight."""
        ext4_fd = -1
        try:
            if blocks_fd >= 0:
                ext4_fd = os.open("/sys/fs/ext4", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            log("warning", "images are not held when the disk is full", path="/sys/fs/ext4", reason=str(error))
        meminfo_fd, shift = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC), loop_device.read_part_shift()
        return cls(layout, blocks_fd, ext4_fd, meminfo_fd, shift, floor_bytes)

    @property
    def is_able(self) -> bool:
        """Whether images can be told to keep their blocks."""
        return self.ext4_fd >= 0

    def close(self) -> None:
        """Close what was opened."""
        os.close(self.meminfo_fd)
        if self.ext4_fd >= 0:
            os.close(self.ext4_fd)

    def look(self) -> Generator[Wait, bool, float]:
        """Tell the images what the disk's free space asks for; return the seconds until the next look is due."""
        if not self.is_able:
            return _MOST_S
        spaces = [os.statvfs(each) for each in (self.layout.sessions, self.layout.volumes)]
        free = min(each.f_bavail * each.f_frsize for each in spaces) - self._bytes_on_their_way()
        floor = min(self.floor_bytes, *(each.f_blocks * each.f_frsize // 2 for each in spaces))
        was_holding = self._is_holding
        self._is_holding = floor > 0 and free < floor * (_BACK if was_holding else 1)
        if self._is_holding or was_holding or self._untold:  # while holding each time: there may be a new image
            changed = yield from self._tell(hold=self._is_holding)
            if changed:
                word = "take no more: the disk is full" if self._is_holding else "take blocks again"
                log("warning", f"images {word}", count=changed, free_bytes=free, floor_bytes=floor)
        rate = _BYTES_PER_PROCESSOR_S * (os.cpu_count() or 1)
        return min(_MOST_S, max(_LEAST_S, (abs(free - floor) + floor / 2) / rate))

    @property
    def _ext4(self) -> str:
        return f"/proc/self/fd/{self.ext4_fd}"

    def _bytes_on_their_way(self) -> int:
        words = os.pread(self.meminfo_fd, 4096, 0).split()
        return sum(1024 * int(words[words.index(name) + 1]) for name in (b"Dirty:", b"Writeback:"))

    def _tell(self, *, hold: bool) -> Generator[Wait, bool, int]:
        """Set how many blocks each image keeps; return how many images kept another number before."""
        changed, names = 0, {name for name in os.listdir(self._ext4) if _LOOP.fullmatch(name)}
        self._told = {name: kept for name, kept in self._told.items() if hold and name in names}
        self._untold &= names
        for seen, name in enumerate(names, 1):
            try:
                changed += self._tell_one(name, hold=hold)
                self._untold.discard(name)
            except OSError as error:
                if name not in self._untold:
                    log("error", "an image is not held, or not released", path=name, reason=str(error))
                self._untold.add(name)
            if seen % _IMAGES_AT_ONCE == 0:
                yield Wait(timeout_s=0)
        return changed

    def _tell_one(self, name: str, *, hold: bool) -> bool:
        path = f"{self._ext4}/{name}/reserved_clusters"
        kept = read_file(path)
        if not kept or self._told.get(name) == int(kept):
            return False  # unmounted meanwhile; or no other file system since
        fd = loop_device.open_image(self.layout, self.part_shift, self.blocks_fd, int(name.removeprefix("loop")))
        if fd is None:
            return False  # another program's
        try:
            # In the memory of the mounted file system, which knows of no more blocks.
            blocks = read_size(fd).size_bytes // k.EXT4_BLOCK_BYTES
        finally:
            os.close(fd)
        usual = min(blocks // _USUAL_PART, _USUAL_MOST)
        wanted = blocks - 1 if hold else min(usual, int(kept))
        if wanted != int(kept):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"%d" % wanted)
            finally:
                os.close(fd)
        if hold:
            self._told[name] = wanted
        return wanted != int(kept)
