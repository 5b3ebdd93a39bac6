"""Every path nsinit touches below the data directory, and how to open a path inside a hostile root filesystem.

Paths are built here from the data directory and validated names, and nowhere else. No function here makes a mount.
Sources: openat2(2); path_resolution(7).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls

IN_ROOT = k.RESOLVE_IN_ROOT | k.RESOLVE_NO_SYMLINKS | k.RESOLVE_NO_MAGICLINKS
"""No link of an image is ever followed: `/dev -> /etc` makes the build fail instead of mounting over `/etc`."""

SOCKET_NAME = "r.sock"
USE_NAME = "image"
"""The name of the record of a session's image, beside its socket."""
SHARED_MODE = 0o1770
"""Mode of a data directory: sticky, so that a user who may write in it can't rename or remove root's files."""

DIGEST_PREFIX = "sha256:"

_FLAGS = struct.Struct("l")


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths below `data_dir`, a real path wherever mounts are looked for. `gid`: the group of a daemon that is not
    root, which may reach the sockets of sessions and keeps files of its own in the data directory; 0 without one."""

    data_dir: str
    gid: int = 0

    @property
    def stage(self) -> str:
        """Mount point of the private tmpfs with templates; only nsinit's mount namespace has something on it."""
        return f"{self.data_dir}/stage"

    @property
    def sessions(self) -> str:
        return f"{self.data_dir}/sessions"

    @property
    def disk(self) -> str:
        """Templates of disk images."""
        return f"{self.data_dir}/disk"

    @property
    def workspaces(self) -> str:
        return f"{self.data_dir}/workspaces"

    @property
    def drafts(self) -> str:
        """Workspaces that are being filled and not published yet."""
        return f"{self.data_dir}/drafts"

    @property
    def volumes(self) -> str:
        """Workspaces with a quota."""
        return f"{self.data_dir}/volumes"

    @property
    def volume_drafts(self) -> str:
        """Volumes that are being made, or filled and not published yet."""
        return f"{self.data_dir}/volume-drafts"

    @property
    def run(self) -> str:
        return f"{self.data_dir}/run"

    @property
    def trash(self) -> str:
        return f"{self.data_dir}/trash"

    @property
    def layers(self) -> str:
        """Unpacked layers, by digest, and drafts of layers."""
        return f"{self.data_dir}/layers"

    @property
    def images(self) -> str:
        return f"{self.data_dir}/images"

    def layer(self, digest: str) -> str:
        """The directory of a layer; `digest` has the name of its function in front, which no path has."""
        return f"{self.layers}/{digest.removeprefix(DIGEST_PREFIX)}"

    def layer_files(self, digest: str) -> str:
        return f"{self.layer(digest)}/fs"

    def image(self, name: str) -> str:
        return f"{self.images}/{name}"

    def image_rootfs(self, name: str) -> str:
        return f"{self.image(name)}/rootfs"

    def image_shells(self, name: str) -> str:
        return f"{self.image(name)}/shells"

    def image_layers(self, name: str) -> str:
        """The list of an image's layers, the lowest first, one on a line."""
        return f"{self.image(name)}/layers"

    def session(self, session_id: str) -> str:
        return f"{self.sessions}/{session_id}"

    def session_run(self, session_id: str) -> str:
        return f"{self.run}/{session_id}"

    def session_use(self, session_id: str) -> str:
        """The record of a session's image and its layers."""
        return f"{self.session_run(session_id)}/{USE_NAME}"

    def workspace(self, workspace_id: str, *, draft: bool = False) -> str:
        return f"{self.drafts if draft else self.workspaces}/{workspace_id}"

    def volume(self, workspace_id: str, *, draft: bool = False) -> str:
        return f"{self.volume_drafts if draft else self.volumes}/{workspace_id}"

    def make(self) -> None:
        """Make the directories nsinit owns, and check that they are root's. Each is closed to every other user, except
        for `gid`: in the data directory the daemon's group can make files, and remove only its own."""
        os.makedirs(self.data_dir, mode=0o700, exist_ok=True)
        os.chown(self.data_dir, -1, self.gid)
        os.chmod(self.data_dir, SHARED_MODE if self.gid else 0o700)
        spread_subdirectories(self.data_dir)
        workspaces = self.workspaces, self.drafts, self.volumes, self.volume_drafts
        for path in (self.stage, self.sessions, *workspaces, self.run, self.trash):
            make_directory(path)
            check_owner(path)
        spread_subdirectories(self.sessions)
        self._let_pass(self.run)
        self.make_store()
        self._let_pass(self.layers)

    def make_store(self) -> None:
        """Make the directories of layers and images, and check that they are root's."""
        for path in (self.layers, self.images, self.trash):
            make_directory(path)
            check_owner(path)

    def share_socket(self, session_id: str) -> None:
        """Let the daemon's group reach the socket of a session: pass through its directory, and write to the socket."""
        directory = self.session_run(session_id)
        if self.gid:
            path = f"{directory}/{SOCKET_NAME}"
            os.chown(path, 0, self.gid, follow_symlinks=False)
            os.chmod(path, 0o660)
        self._let_pass(directory)

    def _let_pass(self, directory: str) -> None:
        """Let the daemon's group open entries whose names it knows, and neither list nor change the directory."""
        os.chown(directory, 0, self.gid)
        os.chmod(directory, 0o710 if self.gid else 0o700)


def make_directory(path: str, *, mode: int = 0o700) -> None:
    """Make one directory if there is none. Raises `OSError` if another kind of file has the name."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        os.close(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW))


def check_owner(path: str) -> None:
    """Raise `PermissionError` if another user owns the directory, who made it before nsinit and could swap it later."""
    _check_uid(os.lstat(path).st_uid, path)


def check_owner_of(fd: int, path: str) -> None:
    """Raise `PermissionError` if another user owns an open directory; `path` is for the error."""
    _check_uid(os.fstat(fd).st_uid, path)


def _check_uid(owner: int, path: str) -> None:
    if owner != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}", path)


def sync_directory(path: str) -> None:
    """Wait until the names in one directory are on the disk: fsync(2)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    os.fsync(fd)
    os.close(fd)


def spread_subdirectories(path: str) -> None:
    """Ask ext4 to put each subdirectory of `path` into a block group of its own (chattr +T).

    ext4 steps over every inode that was freed in a block group within the last minute, one by one: with many sessions
    made and removed in one block group, each file creation there takes close to 1 ms instead of 0.02 ms.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        (flags,) = _FLAGS.unpack(fcntl.ioctl(fd, k.FS_IOC_GETFLAGS, _FLAGS.pack(0)))
        fcntl.ioctl(fd, k.FS_IOC_SETFLAGS, _FLAGS.pack(flags | k.FS_TOPDIR_FL))
    except OSError:
        pass  # another file system, another allocator
    finally:
        os.close(fd)


def open_in_root(root_fd: int, path: str, flags: int = os.O_PATH) -> int:
    """Open `path` below `root_fd` as if that were `/`, following no link at all."""
    return syscalls.openat2(root_fd, path, flags, resolve=IN_ROOT)


def open_directory(root_fd: int, path: str, *, owner: int, mode: int = 0o755) -> int:
    """Open the directory `path` below `root_fd` (O_PATH); make the missing parts, owned by `owner`.

    Each parent is a descriptor that was itself opened without following a link, so no directory is ever made elsewhere.
    """
    try:
        return open_in_root(root_fd, path, os.O_PATH | os.O_DIRECTORY)  # mostly all of it is there
    except OSError:
        current = os.dup(root_fd)
    for name in path.strip("/").split("/"):
        try:
            os.mkdir(name, mode, dir_fd=current)
            os.chown(name, owner, owner, dir_fd=current, follow_symlinks=False)
        except FileExistsError:
            pass
        try:
            child = open_in_root(current, name, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            error.filename = f"/{path.strip('/')}"
            raise
        finally:
            os.close(current)
        current = child
    return current
