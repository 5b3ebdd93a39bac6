"""Values of images: what the configuration of an image says about commands in it. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen
class ImageConfig:
    """The kept part of an image's configuration (OCI image specification, `config.md`)."""

    env: Mapping[str, str] = attrs.field(factory=dict)
    working_dir: str = ""
    user: str = ""
    entrypoint: Sequence[str] = ()
    cmd: Sequence[str] = ()
    labels: Mapping[str, str] = attrs.field(factory=dict)
    exposed_ports: Sequence[str] = ()
    volumes: Sequence[str] = ()
    stop_signal: str = ""
