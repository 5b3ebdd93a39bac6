"""What a start has to say: of protections that are not fully on, and of images that the configuration names.

`Config.notices` has what needs neither machine nor disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sandkasten.config import Config
from sandkasten.images.catalog import Catalog
from sandkasten.model.node import Protection, State


def protection_notices(found: Sequence[Protection]) -> list[str]:
    """Say which protections are not fully on, one sentence each."""
    return [f"{each.name} is {each.state}: {each.detail}" for each in found if each.state is not State.ON]


def image_notices(config: Config) -> list[str]:
    """Say which configured image names lead to no image, one sentence each. Nothing if the store can't be read."""
    if config.data_dir.exists() and not os.access(config.data_dir, os.R_OK | os.X_OK):
        return []
    catalog = Catalog(config.data_dir, aliases=config.image_aliases)
    notices = []
    if catalog.unknown([config.default_image]):
        notices.append(f"default_image: there is no image {config.default_image!r} yet; sessions must name another")
    if missing := catalog.unknown(config.allowed_images):
        notices.append(f"allowed_images: there is no image {', '.join(map(repr, missing))} yet")
    return notices
