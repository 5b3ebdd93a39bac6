"""An initial RAM disk of a shell and a few kernel modules: the distribution's own takes longer to unpack than to use.

Pure: bytes in, bytes out. The archive is cpio's "newc" format, which the kernel unpacks into its first root.
Sources: Documentation/driver-api/early-userspace/buffer-format.rst; modules.dep(5).
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping

_MAGIC = "070701"
_ALIGN = 4


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return an archive of executable files and of the directories above them."""
    parts = [_member(name, b"", stat.S_IFDIR | 0o755) for name in _directories(files)]
    parts += [_member(name, content, stat.S_IFREG | 0o755) for name, content in files.items()]
    return b"".join([*parts, _member("TRAILER!!!", b"", 0)])


def load_order(modules_dep: str, wanted: Iterable[str]) -> list[str]:
    """Return the paths of the modules named `wanted` and of all they need, each after what it needs."""
    needs = {}
    for line in modules_dep.splitlines():
        path, _, rest = line.partition(":")
        needs[path.rpartition("/")[2].partition(".")[0]] = [*reversed(rest.split()), path]
    return list(dict.fromkeys(path for name in wanted for path in needs.get(name, [])))


def _directories(files: Mapping[str, bytes]) -> list[str]:
    found = {"/".join(parts[:depth]) for name in files for parts in [name.split("/")] for depth in range(1, len(parts))}
    return sorted(found)


def _member(name: str, content: bytes, mode: int) -> bytes:
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
    header = (_MAGIC + "".join(f"{field:08X}" for field in fields)).encode()
    return _padded(header + path) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGN)
