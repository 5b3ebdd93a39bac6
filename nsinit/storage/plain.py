"""Mode `none`: layers are plain directories, and nothing limits them but the file system they are on."""

from __future__ import annotations

import os
from typing import ClassVar

from nsinit.storage.mechanism import UNKNOWN, Mechanism, Place, Usage, make_layers
from nsinit.wire.protocol import DiskLimits, DiskMode


class Plain(Mechanism):
    """See the module's docstring."""

    mode: ClassVar[DiskMode] = "none"

    def make(self, place: Place, limits: DiskLimits) -> None:
        os.mkdir(place.directory, 0o700)
        make_layers(place.directory, place.base)

    def fit(self, place: Place, limits: DiskLimits) -> None:
        return

    def change(self, place: Place, limits: DiskLimits) -> None:
        return

    def usage(self, place: Place, root_fd: int) -> Usage:
        return UNKNOWN
