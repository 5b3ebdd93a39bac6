"""`sandkasten image export NAME`: an image as a tar of an OCI layout, to a file or to standard output."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

from sandkasten.admission.budget import disk_floor_bytes
from sandkasten.cli.common import Stop, load_installed, printable_line, require_root
from sandkasten.errors import SandkastenError
from sandkasten.host.paths import DataPaths
from sandkasten.images.catalog import Catalog
from sandkasten.images.exporting import export_image
from sandkasten.images.layers import open_store
from sandkasten.images.registry.blobs import Blobs

_FILE_MODE = 0o600  # as the image: a session may have left a secret in it


def export(arguments: argparse.Namespace) -> int:
    """Export an image, and say on standard error what came of it."""
    require_root()
    config = load_installed(arguments)
    catalog = Catalog(config.data_dir, aliases=config.image_aliases)
    blobs = Blobs(DataPaths(config.data_dir).blobs, floor_bytes=disk_floor_bytes(config.data_dir, config.disk))
    try:
        with _target(arguments.output) as target, open_store(config.data_dir) as store:
            done = export_image(catalog, store, blobs, arguments.name, target, arguments.compression)
    except SandkastenError as error:
        raise Stop(str(error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Stop(f"{arguments.output}: {error.strerror}") from None
    print(f"{printable_line(arguments.name)}: {done.digest}", file=sys.stderr)
    if done.is_repacked:
        print("layers of other tools have other digests in the export, of the same files", file=sys.stderr)
    if done.skipped:
        print(f"left out {done.skipped} files or attributes that no archive can hold", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _target(path: str) -> Iterator[IO[bytes]]:
    """Open what is written to: a file has its name once it is whole."""
    if path == "-":
        if sys.stdout.isatty():
            raise Stop("an archive is nothing for a terminal: give -o FILE, or a pipe")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    fd, made = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".export-")
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fchmod(fd, _FILE_MODE)
            os.fsync(fd)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise
