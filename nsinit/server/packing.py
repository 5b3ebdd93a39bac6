"""The packing of layers into archives, by a fresh program that jails itself (`tools/pack.py`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from dataclasses import dataclass

from nsinit.scheduler import Wait
from nsinit.server.jails import Jails
from nsinit.spawn import spawn_packer
from nsinit.steps import StepFailed
from nsinit.storage.layers import LayerDirectory
from nsinit.storage.paths import DIGEST_PREFIX
from nsinit.wire.protocol import LayerPacked, PackLayer
from nsinit.wire.verdict import Unpacked

MAX_JAILS = 2
STAGE = "pack"
BYTES_PER_ENTRY = 1 << 18
"""The most bytes of an archive beside the content, for each entry: headers with a long name and attributes."""


@dataclass(slots=True)
class Packing:
    """Packs the layers of a store into archives."""

    store: LayerDirectory
    jails: Jails

    def pack(self, request: PackLayer, fds: list[int]) -> Generator[Wait, bool, LayerPacked]:
        """Pack a layer. `fds`: see `PackLayer`. Raises `StepFailed`, `OSError`."""
        out_fd, asker_fd = fds
        yield from self.jails.admit()
        try:
            arguments = str(os.getpid()), str(request.max_entries), str(request.max_bytes)
            bounds = request.max_entries, request.max_bytes + request.max_entries * BYTES_PER_ENTRY
            with self.store.open_files(request.digest) as files:
                packed = yield from self.jails.run(
                    lambda verdict_fd: spawn_packer(verdict_fd, out_fd, files, *arguments), asker_fd, bounds
                )
        except FileNotFoundError:
            raise StepFailed(STAGE, "there is no such layer, or no list of its marks", errno=errno.ENOENT) from None
        finally:
            self.jails.leave()
        return answer(request.seq, packed)


def answer(seq: int, packed: Unpacked) -> LayerPacked:
    """Return the answer that a packer's verdict is."""
    return LayerPacked(seq, DIGEST_PREFIX + packed.digest, *packed.counts)
