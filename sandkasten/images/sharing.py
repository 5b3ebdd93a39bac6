"""Lets the daemon's group read what there is to know of images: their names and `meta.json`. The files stay root's.

Runs as root, on what only root may change. Opens no link. Who makes an image calls `share_image` before it gets its
name; a start calls `share_store` for those that are there already.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from sandkasten.config import ConfigError
from sandkasten.model import IMAGE_NAME

META = "meta.json"
_DIRECTORY = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


def share_store(images: Path, gid: int) -> None:
    """Make the directory of images if there is none, and let the group `gid` read it; 0: nobody.

    Raises:
        ConfigError: it is no directory of root's.
    """
    with contextlib.suppress(FileExistsError):
        images.mkdir(mode=0o700)
    try:
        store_fd = os.open(images, _DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{images} can't be used: {error.strerror}") from error
    try:
        if os.fstat(store_fd).st_uid != os.geteuid():
            raise ConfigError(f"{images} belongs to another user; look at what is in it, and remove it or chown it")
        _let_read(store_fd, gid)
        for name in filter(IMAGE_NAME.match, os.listdir(store_fd)):
            with contextlib.suppress(NotADirectoryError):
                share_image(store_fd, name, gid)
    finally:
        os.close(store_fd)


def share_image(store_fd: int, name: str, gid: int) -> None:
    """Let the group read one image's `meta.json`, if it has one."""
    image_fd = os.open(name, _DIRECTORY, dir_fd=store_fd)
    try:
        _let_read(image_fd, gid)
        with contextlib.suppress(FileNotFoundError):
            meta_fd = os.open(META, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=image_fd)
            try:
                if stat.S_ISREG(os.fstat(meta_fd).st_mode):
                    os.fchown(meta_fd, -1, gid)
                    os.fchmod(meta_fd, 0o640)
            finally:
                os.close(meta_fd)
    finally:
        os.close(image_fd)


def _let_read(directory_fd: int, gid: int) -> None:
    os.fchown(directory_fd, -1, gid)
    os.fchmod(directory_fd, 0o750 if gid else 0o700)
