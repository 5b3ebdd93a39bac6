"""`sandkasten init`: makes configuration, key and default image if missing, and changes no existing one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sandkasten.cli.common import Stop, load, make_data_dir, require_root
from sandkasten.cli.keys import with_key
from sandkasten.config import Config
from sandkasten.errors import SandkastenError

_TEXT = """\
# sandkasten's configuration; docs/configuration.md has every key. SANDKASTEN_<KEY> overrides each one.
listen: {listen}
data_dir: {data_dir}
"""


def init(arguments: argparse.Namespace) -> int:
    """Make the missing parts and print their places."""
    require_root()
    made_file = arguments.config is not None and not arguments.config.exists()
    path, arguments.config = arguments.config, None if made_file else arguments.config
    config = load(arguments)
    make_data_dir(config.data_dir)
    if made_file:
        _write(path, config)
    with_key(config)
    _make_image(config)
    if path is not None:
        print(f"configuration: {path}")
    print(f"API key: {'the configured one' if config.api_key else config.api_key_path}")
    return 0


def _write(path: Path, config: Config) -> None:
    import yaml

    addresses = list(config.listen) if len(config.listen) > 1 else config.listen[0]
    text = _TEXT.format(
        listen=yaml.safe_dump(addresses, default_flow_style=True).split("\n")[0],
        data_dir=yaml.safe_dump(str(config.data_dir)).split("\n")[0],
    )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise Stop(f"can't write {path}: {error.strerror}") from None


def _make_image(config: Config) -> None:
    from sandkasten.images.catalog import Catalog
    from sandkasten.images.host import ensure_host_image

    catalog = Catalog(config.data_dir, aliases=config.image_aliases)
    try:
        ensure_host_image(catalog)
        image = catalog.get(config.default_image)
    except SandkastenError as error:
        raise Stop(str(error)) from None
    print(
        f"default image: {config.default_image}" + (f" (alias of {image.name})" * (image.name != config.default_image))
    )
