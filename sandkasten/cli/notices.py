"""Warnings of `sandkasten serve` and `doctor`: what works, and is probably not what the operator wants."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from sandkasten.config import Config
from sandkasten.host.checks import check_merging, disk_notices, read_host
from sandkasten.images.catalog import Catalog


def notices(config: Config) -> list[str]:
    """Return a sentence for each setting or condition that an operator should know of at a start."""
    return [
        *config.notices(),
        *disk_notices(config.data_dir, config.defaults.disk_limit_mb),
        *_image_notices(config),
        *_merge_notices(config),
        *_client_notices(),
    ]


def _image_notices(config: Config) -> list[str]:
    """Tell of configured image names without an image; of none if the store can't be read."""
    if config.data_dir.exists() and not os.access(config.data_dir, os.R_OK | os.X_OK):
        return []
    catalog = Catalog(config.data_dir, aliases=config.image_aliases)
    found = []
    if catalog.unknown([config.default_image]):
        found.append(f"default_image: there is no image {config.default_image!r} yet; sessions must name another")
    if missing := catalog.unknown(config.allowed_images):
        found.append(f"allowed_images: there is no image {', '.join(map(repr, missing))} yet")
    return found


def _merge_notices(config: Config) -> list[str]:
    """Tell of pages that shall be merged and are not. The daemon starts all the same."""
    if not config.isolation.merge_pages or not (check := check_merging(read_host(config.data_dir))).fix:
        return []
    return [f"isolation.merge_pages: {check.seen}, so nothing is merged; {check.fix}"]


def _client_notices() -> list[str]:
    """Tell of the published client in this environment: both distributions install files of the package `sandkasten`,
    and pip removes those of the one that goes, whoever wrote them last."""
    try:
        client = version("sandkasten")
    except PackageNotFoundError:
        return []
    return [
        f"the client sandkasten {client} is in the daemon's environment, and both own the package `sandkasten`: "
        "uninstall the client, install sandkasten-runtime again, and keep the client in an environment of its own"
    ]
