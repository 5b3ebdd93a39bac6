"""The packing of layers, and of what sessions have changed, by a fresh program that jails itself (`tools/pack.py`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

from nsinit.cgroup import freezer
from nsinit.cgroup.identity import open_mounts, open_root, require_identity
from nsinit.cgroup.session import SessionCgroup
from nsinit.cgroup.tree import Tree
from nsinit.kernel.mounts import Features
from nsinit.scheduler import Wait
from nsinit.server.jails import Jails
from nsinit.spawn import spawn_packer
from nsinit.steps import StepFailed, failure_of
from nsinit.storage.layers import LayerDirectory
from nsinit.storage.paths import DIGEST_PREFIX
from nsinit.wire.protocol import LayerPacked, PackLayer, PackSession

MAX_JAILS = 2
"""Of each kind: whoever reads the archive of a layer may be slow, and no session is to stand still for that."""
STAGE = "pack"
BYTES_PER_ENTRY = 1 << 18
"""The most bytes of an archive beside the content, for each entry: headers with a long name and attributes."""


@dataclass(slots=True)
class Packing:
    """Packs the layers of a store, and the changes of sessions, into archives."""

    store: LayerDirectory
    jails: Jails
    session_jails: Jails

    def pack(self, request: PackLayer, fds: list[int]) -> Generator[Wait, bool, LayerPacked]:
        """Pack a layer, or an image's files. `fds`: see `PackLayer`. Raises `StepFailed`, `OSError`."""
        out_fd, asker_fd = fds
        yield from self.jails.admit()
        try:
            with self.store.open_files(request.name) as (files_fd, privileged_fd, opaque_fd):
                packed = yield from self.jails.run(
                    lambda verdict_fd: spawn_packer(
                        privileged_fd, verdict_fd, files_fd, out_fd, opaque_fd, arguments=_bounds(request)
                    ),
                    asker_fd,
                    _most(request),
                )
        except FileNotFoundError:
            raise StepFailed(STAGE, "there is no such layer, or no list of its marks", errno=errno.ENOENT) from None
        finally:
            self.jails.leave()
        return LayerPacked(request.seq, DIGEST_PREFIX + packed.digest, *packed.counts)

    def pack_session(
        self, request: PackSession, fds: list[int], tree: Tree, features: Features
    ) -> Generator[Wait, bool, LayerPacked]:
        """Pack what a session has above some of its layers. `fds`: see `PackSession`. Raises `StepFailed`."""
        out_fd, asker_fd = fds
        yield from self.session_jails.admit()
        try:
            with ExitStack() as opened:
                try:
                    cgroup = SessionCgroup(tree, request.session_id)
                    identity = require_identity(cgroup, STAGE)
                    if not freezer.is_frozen(cgroup):
                        raise StepFailed(STAGE, "the session runs", errno=errno.EBUSY)
                    below = self._layers_of(request.session_id)
                    files = []
                    for fd in (open_root(identity), out_fd, open_mounts(identity)):
                        files.append(fd)
                        if fd != out_fd:
                            opened.callback(os.close, fd)
                except OSError as error:
                    raise failure_of(STAGE, error) from error
                layout = self.store.layout
                paths = (layout.layer_files(each) for each in reversed(below))
                numbers = identity.base_uid, request.base_layers, features.overlay_by_fd
                views = *(str(int(each)) for each in numbers), layout.stage, *paths
                packed = yield from self.session_jails.run(
                    lambda verdict_fd: spawn_packer(None, verdict_fd, *files, arguments=(*_bounds(request), *views)),
                    asker_fd,
                    _most(request),
                    request.session_id,
                )
        finally:
            self.session_jails.leave()
        return LayerPacked(request.seq, DIGEST_PREFIX + packed.digest, *packed.counts, below)

    def _layers_of(self, session_id: str) -> tuple[str, ...]:
        """Return the layers that a session has, none where its image is no list."""
        try:
            return self.store.use_of(session_id)[1]
        except FileNotFoundError:
            return ()


def _bounds(request: PackLayer | PackSession) -> tuple[str, ...]:
    return str(os.getpid()), str(request.max_entries), str(request.max_bytes)


def _most(request: PackLayer | PackSession) -> tuple[int, int]:
    """Return bounds of entries, and of bytes of the archive."""
    return request.max_entries, request.max_bytes + request.max_entries * BYTES_PER_ENTRY
