"""The listing of a layer: what the unpacker made of each member, so that damage to the files is found later.

Fields end with a NUL. `=DIGEST PATH` is a file, directory, link or whiteout, `&TARGET` and then a field of a path a
second name of the target, `-PATH` a directory that made way for something else. A later field counts more than an
earlier one. The digest is that of status and content, without the name; a directory's is without its time.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct

NAME = "listing"
"""The file's name, beside the layer's files."""
_STATUS = struct.Struct("<3I2q")


def entry_digest(status: os.stat_result, content: bytes) -> bytes:
    """Return the digest of an entry, in hex. `content`: the digest of a file's bytes, or the target of a link."""
    mode, size, time_ns = status.st_mode, status.st_size, status.st_mtime_ns
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        size = time_ns = 0
    said = _STATUS.pack(mode, status.st_uid, status.st_gid, size, time_ns)
    return hashlib.sha256(said + content).hexdigest().encode()


def entry_field(path: bytes, status: os.stat_result, content: bytes) -> bytes:
    """Return the field of a file or directory: the digest of its state, and its path."""
    return b"=%b %b\0" % (entry_digest(status, content), path)


def link_field(path: bytes, target: bytes) -> bytes:
    """Return the fields of a further name of a file."""
    return b"&%b\0%b\0" % (target, path)


def removal_field(path: bytes) -> bytes:
    """Return the field of a directory that went with all that was in it."""
    return b"-%b\0" % path


def read_listing(data: bytes) -> dict[bytes, bytes]:
    """Return the digest of each entry by its path. Raises `ValueError`: it is no listing."""
    fields = iter(data.split(b"\0")[:-1])
    found: dict[bytes, tuple[int, bytes]] = {}
    removed: dict[bytes, int] = {}
    for at, field in enumerate(fields):
        kind, rest = field[:1], field[1:]
        if kind == b"=":
            digest, _, path = rest.partition(b" ")
            found[path] = at, digest
        elif kind == b"&" and rest in found:
            found[next(fields, b"")] = at, found[rest][1]
        elif kind == b"-":
            removed[rest] = at
        else:
            raise ValueError("a field of no kind")
    return {path: digest for path, (at, digest) in found.items() if not _is_removed(path, at, removed)}


def _is_removed(path: bytes, at: int, removed: dict[bytes, int]) -> bool:
    """Whether a directory above went later."""
    above = path
    while removed and (above := above.rpartition(b"/")[0]):
        if removed.get(above, -1) > at:
            return True
    return False
