"""What lies on the disk with too many rights: key, configuration, data directory, images. Reads, changes nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sandkasten.config import Config, ConfigError
from sandkasten.host.account import ROOT, Account, find_account
from sandkasten.host.data_dir import SHARED_MODE
from sandkasten.images.catalog import Catalog
from sandkasten.security.posture.finding import Finding, high, low

_MAX_ENTRIES = 200_000
_OTHERS = 0o077


def check_places(config: Config, config_path: Path | None) -> Iterator[Finding]:
    """Yield what is wrong with files and directories; what does not exist yet is fine."""
    account = _account(config)
    yield from check_key_file(config.api_key_path, account)
    if config_path is not None:
        yield from check_config_file(config_path, holds_key=config.api_key is not None)
    yield from check_directory(config.data_dir, account)
    for address in config.listen:
        if address.startswith("unix:"):
            yield from check_above(Path(address.removeprefix("unix:")), "listen.socket-directory")
    yield from check_images(config)


def _account(config: Config) -> Account:
    """Return whom the daemon's files may belong to, besides root."""
    try:
        return find_account(config.user)
    except ConfigError:
        return ROOT  # no daemon starts with that account


def check_key_file(path: Path, account: Account = ROOT) -> Iterator[Finding]:
    """The key must be a plain file that its owner alone can read: root, the daemon's account, or who asks."""
    try:
        status = path.lstat()
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        yield high(
            "key.not-a-file",
            f"{path} is no regular file",
            "whoever can change what it leads to chooses the key",
            f"rm {path}, and restart: a new key is made",
        )
    elif status.st_mode & _OTHERS or status.st_uid not in (0, os.geteuid(), account.uid):
        yield high(
            "key.mode",
            f"{path} has mode {stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}",
            "others on this machine can read or change the key",
            f"rm {path}, and restart: a new key is made",
        )


def check_config_file(path: Path, *, holds_key: bool) -> Iterator[Finding]:
    """Who can write it decides what is protected; who can read it has the key if that is in there."""
    try:
        status = path.stat()
    except OSError:
        return
    if status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid()):
        yield high(
            "config.writable",
            f"{path} has mode {stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}",
            "others can switch every protection off",
            f"chown root {path}; chmod 600 {path}",
        )
    elif holds_key and status.st_mode & 0o044:
        yield high(
            "config.readable",
            f"others may read {path}, and a key is configured",
            "if the key is in that file, everybody on this machine has it",
            f"chmod 600 {path}",
        )
    yield from check_above(path, "config.directory")


def check_directory(path: Path, account: Account = ROOT) -> Iterator[Finding]:
    """Inside are other users' files with their modes: the directory itself is the wall. The daemon's group may make
    files in a directory of root's that is sticky."""
    try:
        status = path.stat()
    except OSError:
        return
    seen = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    is_shared = not account.is_root and seen == (SHARED_MODE, 0, account.gid)
    if not is_shared and (status.st_mode & _OTHERS or status.st_uid not in (0, os.geteuid())):
        yield high(
            "data.mode",
            f"{path} has mode {stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}",
            "others on this machine can enter it: sessions' files, images and setuid files in them",
            f"chmod 700 {path}",
        )
    yield from check_above(path, "data.above")


def check_above(path: Path, name: str) -> Iterator[Finding]:
    """A directory above that others may write lets them put another one in its place."""
    for parent in path.absolute().parents:
        try:
            mode = parent.stat().st_mode
        except OSError:
            continue
        if mode & 0o022 and not mode & stat.S_ISVTX:
            yield high(
                name,
                f"{parent}, above {path}, has mode {stat.S_IMODE(mode):o}",
                "others can rename what is in there and put their own in its place",
                f"chmod go-w {parent}",
            )


def check_images(config: Config) -> Iterator[Finding]:
    """Setuid files are inert inside; an image full of them is worth knowing all the same."""
    catalog = Catalog(config.data_dir, aliases=config.image_aliases)
    try:
        images = catalog.images()
    except OSError:
        return
    for image in images:
        if found := privileged_files(catalog.rootfs_path(image.name)):
            yield low(
                "image.setuid",
                f"image {image.name!r} has {len(found)} setuid or setgid files, such as {found[0]}",
                "inside they give nothing (nosuid, no_new_privs); on this machine only the data directory's mode"
                " keeps its users away from them",
                f"import it again (`sandkasten image import` drops the bits): sandkasten image delete {image.name}",
            )


def privileged_files(root: Path) -> list[str]:
    """Return the setuid and setgid files of a tree, by their paths inside; bounded, and no link is followed."""
    found, seen = [], 0
    for directory, names, files in os.walk(root):
        seen += len(names) + len(files)
        if seen > _MAX_ENTRIES:
            break
        for name in files:
            try:
                mode = os.lstat(os.path.join(directory, name)).st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                found.append("/" + os.path.relpath(os.path.join(directory, name), root))
    return found
