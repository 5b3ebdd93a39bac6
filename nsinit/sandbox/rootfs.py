"""The directories and few files that nsinit puts into a session's root file system before any foreign code runs.

Everything is reached by descriptors opened without following a link, and files are made anew (O_EXCL), so an image
can't redirect a write. Sources: openat2(2); hosts(5), hostname(5), resolv.conf(5), passwd(5), group(5).
"""

from __future__ import annotations

import os
import stat

from nsinit.kernel.slots import SANDBOX_ID
from nsinit.sandbox import views
from nsinit.storage.paths import open_directory, open_in_root

HOME = "home/sandbox"
WORKSPACE = "workspace"
_MAX_ACCOUNT_FILE_BYTES = 1 << 20
_ROOT_LINES = {"passwd": "root:x:0:0:root:/root:/bin/sh", "group": "root:x:0:"}
NO_RESOLVER = "# This sandbox has no network but a loopback interface of its own: no name can be resolved.\n"
_SANDBOX_LINES = {
    "passwd": f"sandbox:x:{SANDBOX_ID}:{SANDBOX_ID}::/{HOME}:/bin/sh",
    "group": f"sandbox:x:{SANDBOX_ID}:",
}


class UnsafeFile(Exception):
    """A file of the image that must be read is not a regular file of sane size."""


def make_user_directories(root_fd: int, base: int) -> None:
    """Give the sandbox user a workspace and a home."""
    owner = base + SANDBOX_ID
    for path in (WORKSPACE, HOME):
        fd = open_directory(root_fd, path, owner=base)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        if (status.st_uid, status.st_gid) == (owner, owner):
            continue  # in the image already; a chown would make the overlay copy it up
        parent, _, name = path.rpartition("/")
        parent_fd = open_directory(root_fd, parent, owner=base) if parent else os.dup(root_fd)
        try:
            os.chown(name, owner, owner, dir_fd=parent_fd, follow_symlinks=False)
        finally:
            os.close(parent_fd)


def write_etc(root_fd: int, base: int, hostname: str) -> None:
    """Write host name, hosts and a resolver configuration without servers, and add an account for the sandbox user."""
    etc_fd = open_directory(root_fd, "etc", owner=base)
    try:
        replace_file(etc_fd, "hostname", f"{hostname}\n", base)
        replace_file(etc_fd, "hosts", f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n", base)
        replace_file(etc_fd, "resolv.conf", NO_RESOLVER, base)
        for name in ("passwd", "group"):
            _add_account(etc_fd, name, base)
    finally:
        os.close(etc_fd)


def name_server(root_fd: int, base: int, address: str) -> None:
    """Name the name server of a running session. Its `/etc` may be anything by now: nothing is made there but the file
    itself, and no link is followed. Raises `OSError`."""
    text = f"nameserver {address}\noptions edns0\n"
    try:
        views.rewrite(root_fd, dict.fromkeys(views.RESOLVER, text.encode()))
        return
    except FileNotFoundError:
        pass  # the root is not read-only
    etc_fd = open_in_root(root_fd, "etc", os.O_PATH | os.O_DIRECTORY)
    try:
        replace_file(etc_fd, "resolv.conf", text, base)
    finally:
        os.close(etc_fd)


def replace_file(dir_fd: int, name: str, text: str, owner: int) -> None:
    """Make the file `name` anew in place of the present one; a directory of that name is an error."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=dir_fd)
    try:
        os.write(fd, text.encode("utf-8", "surrogateescape"))
        os.fchown(fd, owner, owner)
        os.fchmod(fd, 0o644)
    finally:
        os.close(fd)


def _add_account(etc_fd: int, name: str, base: int) -> None:
    """Add the sandbox user to `passwd` or `group`, unless the image has an entry for that id."""
    text = _read_small(etc_fd, name)
    lines = text.split("\n") if text else [_ROOT_LINES[name]]
    if any(line.split(":")[2:3] == [str(SANDBOX_ID)] for line in lines):
        return
    kept = "\n".join(lines).rstrip("\n")
    replace_file(etc_fd, name, f"{kept}\n{_SANDBOX_LINES[name]}\n", base)


def _read_small(dir_fd: int, name: str) -> str:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return ""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_ACCOUNT_FILE_BYTES:
            raise UnsafeFile(
                f"/etc/{name} of the image is not a regular file of at most {_MAX_ACCOUNT_FILE_BYTES} bytes"
            )
        return os.read(fd, _MAX_ACCOUNT_FILE_BYTES).decode("utf-8", "surrogateescape")
    finally:
        os.close(fd)
