"""`sandkasten image import FILE`: the file is opened here, as root, and read by a child without root, which finds out
whether it is an archive of images, and imports that. The tar of a root file system is left to the caller."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sandkasten.cli.client import INTERRUPTED
from sandkasten.cli.common import Stop
from sandkasten.cli.pull import Shown, is_served, serve_child, without_root

if TYPE_CHECKING:
    import socket

    from sandkasten.config import Config

_STDIN = "-"
_PIECE_BYTES = 1 << 20


@contextlib.contextmanager
def opened_archive(path: str, config: Config) -> Iterator[tuple[int, str]]:
    """Open a directory, or a file that can be sought in, with its name for the catalogue. What comes through a pipe is
    written to a file without a name first; nobody looks at its bytes here.

    Raises:
        TooLarge: it has more than `images.max_pull_mb`.
        DiskReserve, OSError.
    """
    title = "standard input" if path == _STDIN else os.path.basename(os.path.abspath(path))
    with contextlib.ExitStack() as stack:
        fd = os.dup(0) if path == _STDIN else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        mode = os.fstat(fd).st_mode
        yield (fd if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else stack.enter_context(_spooled(fd, config))), title


@contextlib.contextmanager
def _spooled(source_fd: int, config: Config) -> Iterator[int]:
    from sandkasten.admission.budget import disk_floor_bytes
    from sandkasten.config import MIB
    from sandkasten.host.paths import DataPaths
    from sandkasten.images.registry.blobs import Blobs

    blobs = Blobs(DataPaths(config.data_dir).blobs, floor_bytes=disk_floor_bytes(config.data_dir, config.disk))
    have = 0
    with blobs.unnamed() as file:
        while piece := os.read(source_fd, _PIECE_BYTES):
            have = blobs.append(file, piece, have, config.images.max_pull_mb * MIB)
        yield file.fileno()


def take_layers(config: Config, fd: int, title: str, arguments: argparse.Namespace) -> str | None:
    """Import an archive of images; return the name of the image, or None where the file is no such archive.

    Raises:
        Stop: it was interrupted, or root could not be given away.
        SandkastenError: the import failed.
    """
    from sandkasten.errors import InvalidImage
    from sandkasten.images.layers import open_store
    from sandkasten.images.registry.documents import Platform

    platform = Platform.own() if arguments.platform is None else Platform.parse(arguments.platform)
    if arguments.replace and arguments.name is None:
        raise InvalidImage("an archive does not choose which image it replaces: give a --name")

    def work(sock: socket.socket) -> None:
        from sandkasten.cli.pull_child import import_in_child

        import_in_child(
            sock, config, fd, title, arguments.ref, arguments.name or "", platform, replace=arguments.replace
        )

    shown = Shown(title, as_json=arguments.json)
    try:
        with (
            without_root(config, work, is_served=is_served(config)) as sock,
            contextlib.closing(shown),
            open_store(config.data_dir) as store,
        ):
            done = serve_child(sock, store, config, arguments.name, shown, replace=arguments.replace)
    except KeyboardInterrupt:
        raise Stop("interrupted", INTERRUPTED) from None
    return None if done is None else done.name
