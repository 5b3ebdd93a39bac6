"""A tree that nobody may touch, hashed before and after: names, kinds, owners, times, attributes and contents."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def plant(root: Path) -> Path:
    """Make a tree that looks like what an attacker wants: a device-like directory, secrets, something to run."""
    for name in ("etc", "dev", "workspace/deep", "home/sandbox", "root"):
        (root / name).mkdir(parents=True)
    for name in ("etc/passwd", "etc/shadow", "workspace/deep/kept", "root/key", "r.sock"):
        (root / name).write_text(f"kept: {name}")
    (root / "root").chmod(0o700)
    (root / "link").symlink_to("etc/passwd")
    return root


def digest(root: Path) -> str:
    """Return a hash over everything that a change of the tree would change, but for access times."""
    found = hashlib.sha256()
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        facts = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_ctime_ns, status.st_ino)
        attributes = os.listxattr(path, follow_symlinks=False)
        found.update(repr((str(path.relative_to(root)), facts, attributes)).encode())
        if stat.S_ISREG(status.st_mode):
            found.update(path.read_bytes())
        elif stat.S_ISLNK(status.st_mode):
            found.update(os.readlink(path).encode())
    return found.hexdigest()


@contextmanager
def untouched(root: Path) -> Iterator[Path]:
    """Plant a tree at `root` and assert that it is the same afterwards."""
    before = digest(plant(root))
    yield root
    assert digest(root) == before, "something outside was touched"
