"""The unpacking of layers, by a fresh program that jails itself (`tools/unpack.py`), since no process with all
privileges should read a byte of an archive."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass, replace

from nsinit.scheduler import Wait
from nsinit.server.jails import Jails
from nsinit.spawn import spawn_unpacker
from nsinit.steps import StepFailed, passing
from nsinit.storage.layers import LayerDirectory
from nsinit.storage.paths import DIGEST_PREFIX
from nsinit.wire.protocol import LayerUnpacked, UnpackLayer

MAX_JAILS = 2
STAGE, DIGEST_STAGE = "unpack", "digest"


@dataclass(slots=True)
class Unpacking:
    """Unpacks archives into the layers of a store."""

    store: LayerDirectory
    jails: Jails

    def unpack(self, request: UnpackLayer, fds: list[int]) -> Generator[Wait, bool, LayerUnpacked]:
        """Unpack an archive. `fds`: see `UnpackLayer`. Raises `StepFailed`, `OSError`; nothing is left then."""
        archive_fd, asker_fd = fds
        yield from self.jails.admit()
        try:
            if request.digest and (found := self.store.find(request.digest)) is not None:
                return replace(found, seq=request.seq)
            draft = self.store.make_draft()
            bounds = request.max_entries, request.max_bytes
            arguments = tuple(map(str, (os.getpid(), *bounds, request.reserve_bytes)))
            try:
                unpacked = yield from self.jails.run(
                    lambda verdict_fd: spawn_unpacker(
                        archive_fd, verdict_fd, draft.files_fd, draft.listing_fd, *arguments
                    ),
                    asker_fd,
                    bounds,
                )
                digest = DIGEST_PREFIX + unpacked.digest
                if request.digest not in ("", digest):
                    raise StepFailed(DIGEST_STAGE, f"the content has the digest {digest}, not {request.digest}")
                passing(self.store.crash, "nsinit.layer.unpacked")
                yield from self.store.keep(draft, unpacked)
                is_new = not os.path.lexists(f"{self.store.layout.layers}/{draft.name}")
            finally:
                yield from self.store.discard(draft)
                draft.close()
        finally:
            self.jails.leave()
        return LayerUnpacked(request.seq, digest, *unpacked.counts, len(unpacked.privileged), is_new)
