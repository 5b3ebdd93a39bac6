"""The directories and few files that nsinit puts into a session's root file system before any foreign code runs.

Everything is reached by descriptors opened without following a link, and files are made anew (O_EXCL), so an image
can't redirect a write. Sources: openat2(2); hosts(5), hostname(5), resolv.conf(5), passwd(5), group(5).
"""

from __future__ import annotations

import errno
import os
import stat

from nsinit.kernel.slots import SANDBOX_ID
from nsinit.sandbox import views
from nsinit.storage.paths import open_directory, open_in_root

HOME = "home/sandbox"
WORKSPACE = "workspace"
_MAX_ACCOUNT_FILE_BYTES = 1 << 20
_ROOT_LINES = {"passwd": "root:x:0:0:root:/root:/bin/sh", "group": "root:x:0:"}
_BUNDLES = (
    ("etc/ssl/certs", "ca-certificates.crt"),
    ("etc/pki/ca-trust/extracted/pem", "tls-ca-bundle.pem"),
    ("var/lib/ca-certificates", "ca-bundle.pem"),
)
"""Authorities that an image's programs trust, as directory and name: Debian, Alpine and others; Fedora; openSUSE."""
_MAX_BUNDLE_BYTES = 4 << 20
NO_RESOLVER = "# This sandbox has no network but a loopback interface of its own: no name can be resolved.\n"
_SANDBOX_LINES = {
    "passwd": f"sandbox:x:{SANDBOX_ID}:{SANDBOX_ID}::/{HOME}:/bin/sh",
    "group": f"sandbox:x:{SANDBOX_ID}:",
}


class UnsafeFile(Exception):
    """A file of the image that must be read is not a regular file of sane size."""


def homes(account: str) -> tuple[str, ...]:
    """Return the homes of the sandbox user: ours, and that of an account that was asked for."""
    return (HOME, f"home/{account}") if account else (HOME,)


def make_user_directories(root_fd: int, base: int, account: str) -> None:
    """Give the sandbox user a workspace, and a home by each name."""
    owner = base + SANDBOX_ID
    for path in (WORKSPACE, *homes(account)):
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


def write_etc(root_fd: int, base: int, hostname: str, account: str) -> None:
    """Write host name, hosts and a resolver configuration without servers. Add the sandbox user to passwd and group, in
    passwd under the name `account` unless that is empty."""
    etc_fd = open_directory(root_fd, "etc", owner=base)
    try:
        replace_file(etc_fd, "hostname", f"{hostname}\n", base)
        replace_file(etc_fd, "hosts", f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n", base)
        replace_file(etc_fd, "resolv.conf", NO_RESOLVER, base)
        ids = f"{SANDBOX_ID}:{SANDBOX_ID}"
        line = f"{account}:x:{ids}:{account}:/home/{account}:{_shell(root_fd)}" if account else ""
        _add_account(etc_fd, "passwd", base, line)
        _add_account(etc_fd, "group", base, "")
    finally:
        os.close(etc_fd)


def name_servers(root_fd: int, base: int, *addresses: str) -> None:
    """Name the name servers of a running session. Its `/etc` may be anything by now: nothing is made there but the file
    itself, and no link is followed. Raises `OSError`."""
    text = "".join(f"nameserver {address}\n" for address in addresses) + "options edns0\n"
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


def trust(root_fd: int, base: int, certificate: str) -> str | None:
    """Have programs of a running session trust an authority, by a file of ours that holds the image's bundle, too, and
    by that bundle itself. What is there may be anything by now: no link is followed. Return a sentence on why the
    bundle was left as it is, if it was. Raises `OSError`: there is no file of ours."""
    text, bundle, problem = certificate.encode(), b"", "the image has no bundle of authorities"
    for directory, name in _BUNDLES:
        try:
            dir_fd = open_in_root(root_fd, directory, os.O_PATH | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            bundle = _read_regular(dir_fd, name, _MAX_BUNDLE_BYTES)
            if bundle and text not in bundle:
                bundle = bundle.rstrip(b"\n") + b"\n" + text
                _exchange_file(dir_fd, name, bundle, base)
            problem = ""
        except (OSError, UnsafeFile) as error:  # read-only, full, or the session's own doing
            problem = str(error)
        finally:
            os.close(dir_fd)
        if bundle:
            break
    content = bundle if text in bundle else bundle + text
    try:
        views.rewrite(root_fd, {views.TRUST: content})
    except FileNotFoundError:
        views.write(root_fd, {views.TRUST: content})
    return problem or None


def _exchange_file(dir_fd: int, name: str, content: bytes, owner: int) -> None:
    """Put another file in the place of `name`, whole or not at all."""
    fresh = f".{name}.new"
    replace_file(dir_fd, fresh, "", owner)
    fd = os.open(fresh, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if os.write(fd, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    except OSError:
        os.unlink(fresh, dir_fd=dir_fd)
        raise
    finally:
        os.close(fd)
    os.rename(fresh, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


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


def _shell(root_fd: int) -> str:
    for path in ("bin/bash", "usr/bin/bash"):  # no link is followed, such as from /bin to /usr/bin
        try:
            os.close(open_in_root(root_fd, path))
        except OSError:
            continue
        return f"/{path}"
    return "/bin/sh"


def _add_account(etc_fd: int, name: str, base: int, wanted: str) -> None:
    """Add the sandbox user to `passwd` or `group`, unless the image has an entry for that id. The `wanted` line of
    passwd(5) stands before all others, since programs look for the name of an id, unless the image has its account."""
    text = _read_small(etc_fd, name)
    kept = lines = text.rstrip("\n").split("\n") if text else [_ROOT_LINES[name]]
    if not any(_facts(line)[1:2] == [str(SANDBOX_ID)] for line in lines):
        kept = [*lines, _SANDBOX_LINES[name]]
    if wanted and not any(_facts(line) == _facts(wanted) for line in lines):
        kept = [wanted, *(line for line in kept if _facts(line)[0] != _facts(wanted)[0])]
    if kept is not lines:
        replace_file(etc_fd, name, "\n".join(kept) + "\n", base)


def _facts(line: str) -> list[str]:
    """Return the name and the id in a line of an account file, and the home."""
    fields = line.split(":")
    return [fields[0], *fields[2:3], *fields[5:6]]


def _read_small(etc_fd: int, name: str) -> str:
    return _read_regular(etc_fd, name, _MAX_ACCOUNT_FILE_BYTES).decode("utf-8", "surrogateescape")


def _read_regular(dir_fd: int, name: str, most: int) -> bytes:
    """Return a file's content, nothing if there is no such file. Raises `UnsafeFile`."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return b""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise UnsafeFile(f"{name} of the image is not a regular file of at most {most} bytes")
        return os.read(fd, status.st_size)
    finally:
        os.close(fd)
