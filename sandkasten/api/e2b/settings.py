"""Settings of E2B's API, as its modules need them. Values only."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from sandkasten.model.network import NetworkMode

ENVD_VERSION = "0.6.1"
"""Version that clients take for envd's, and choose their features by: from 0.6.2 on they send metadata of files."""


@attrs.frozen(kw_only=True)
class E2bSettings:
    """`key` seals tokens. `templates` are names of images by E2B's names of templates; other names are images' own.
    `widest` is the most that a sandbox may reach. `max_idle_s` is the longest idle timeout, None without a bound, and
    so is `max_lifetime_s`.
    """

    key: bytes = attrs.field(repr=False)
    templates: Mapping[str, str] = attrs.field(factory=dict)
    widest: NetworkMode = NetworkMode.OPEN
    max_idle_s: float | None = None
    max_lifetime_s: float | None = None
