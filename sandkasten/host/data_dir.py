"""Owners in the data directory: root has its part, the daemon's user the rest. Runs as root, before the daemon.

The directory is root's and sticky, and the daemon's group may write in it: so the daemon makes and removes files of its
own (`DataPaths`: database, key, lock, spool), and can't rename or remove the files of nsinit and the image store. The
API keys are root's to write and the daemon's to read (`admission/keys.py`). Files of an earlier owner are handed over
by descriptor, never through a link. nsinit looks after its own directories (`nsinit/storage/paths.py`),
`images/catalog.py` after images.

Sources: inode(7) sticky bit; open(2) O_NOFOLLOW; proc_sys_fs(5) protected_regular.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sandkasten.config import Config, ConfigError
from sandkasten.host.account import Account
from sandkasten.host.paths import DataPaths

PRIVATE_MODE = 0o700
SHARED_MODE = 0o1770
# O_NOFOLLOW: a link may lead to a file of root's. O_NONBLOCK: the opening of a FIFO must not wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_OF_DATABASE = ("", "-wal", "-shm", "-journal")


def make_data_dir(path: Path) -> None:
    """Make the data directory, closed to other users, also if it was open before.

    Raises:
        OSError: the directory can't be made or closed.
    """
    path.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
    status = path.stat()
    is_shared = stat.S_IMODE(status.st_mode) == SHARED_MODE and status.st_uid == 0
    if not is_shared and stat.S_IMODE(status.st_mode) != PRIVATE_MODE:
        path.chmod(PRIVATE_MODE)


@contextlib.contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold the data directory for this process alone. Raises `ConfigError` while another process holds it."""
    fd = _open_lock(DataPaths(data_dir).lock)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another daemon uses {data_dir}") from None
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)  # with O_CREAT root may not open another user's file in a sticky directory
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o600)


def hand_over(config: Config, account: Account) -> None:
    """Give the daemon's files to `account`, and let it make such files. The caller holds the lock.

    Raises:
        ConfigError: a file of another user is in the way.
        OSError: an owner or a mode can't be changed.
    """
    paths = DataPaths(config.data_dir)
    listening = (paths.listening, paths.listening.with_suffix(".new"))
    root_fd = os.open(config.data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        known = frozenset({0, os.fstat(root_fd).st_gid, account.gid})
        for path in (
            paths.lock,
            paths.node_id,
            paths.node_id.with_suffix(".new"),
            paths.api_key,
            paths.registries,
            *listening,
        ):
            _give_file(root_fd, path.name, account, known)
        _keep_file(root_fd, paths.keys.name, account, known)
        for directory in (paths.spool, paths.blobs):
            _give_directory(root_fd, directory.name, account, known)
        for suffix in _OF_DATABASE:
            _give_file(None, f"{config.db_path}{suffix}", account, known)
        os.fchown(root_fd, 0, account.gid)  # before the mode: the old group must not write
        os.fchmod(root_fd, PRIVATE_MODE if account.is_root else SHARED_MODE)
    finally:
        os.close(root_fd)


def _give_file(dir_fd: int | None, name: str, account: Account, known: frozenset[int]) -> None:
    try:
        fd = os.open(name, _FILE, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{name} in the data directory can't be used: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        # A file with a second name may be another user's, linked here to be given away.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_gid not in known:
            raise ConfigError(
                f"{name} in the data directory is not a plain file of the daemon's; check its content and remove it"
            )
        os.fchown(fd, account.uid, account.gid)
    finally:
        os.close(fd)


def _keep_file(dir_fd: int, name: str, account: Account, known: frozenset[int]) -> None:
    """Keep a file that root writes and the daemon reads; make an empty one, lest the daemon make it."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640, dir_fd=dir_fd))
    _give_file(dir_fd, name, Account(0, account.gid, account.name), known)


def _give_directory(dir_fd: int, name: str, account: Account, known: frozenset[int]) -> None:
    """Hand over a flat directory; the lock keeps other processes from changing it meanwhile."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{name} in the data directory can't be used: {error.strerror}") from error
    try:
        for entry in os.listdir(fd):
            _give_file(fd, entry, account, known)
        os.fchown(fd, account.uid, account.gid)
    finally:
        os.close(fd)
