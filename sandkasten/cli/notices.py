"""What the configuration says of images, held against the store; `Config.notices` has what needs no disk."""

from __future__ import annotations

import os

from sandkasten.config import Config
from sandkasten.images.catalog import Catalog


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
