"""Hostile archives: the dangerous members an image archive may hold, and the damage they must not do.

Each archive is imported into the field's own store. Files beside the store must stay as they were, and every file that
an import lets through must be harmless in a session. Sources: tarfile(3), CVE descriptions, overlayfs.rst (whiteouts,
xattrs).
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import trio

from sandkasten.errors import InvalidImage, SandkastenError
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.model import SessionSpec
from sandkasten.security.attacks.field import Field
from sandkasten.security.probes.attempt import CANARY, Answers, Attempt, attempt

MAX_BYTES = 4 << 20
"""Bound of an archive's files."""
_MAX_MEMBERS = 200
_HARMLESS = ("refused", "harmless")


@attrs.frozen
class Member:
    """One entry of an archive."""

    name: str
    kind: bytes = tarfile.REGTYPE
    content: bytes = b""
    link: str = ""
    mode: int = 0o755
    headers: tuple[tuple[str, str], ...] = ()


_ROOT = (Member("etc", tarfile.DIRTYPE), Member("bin/sh", content=b"#!\n"))
"""The smallest image."""


def _link(name: str, to: str) -> Member:
    return Member(name, tarfile.SYMTYPE, link=to)


def _long_chain(outside: str) -> list[Member]:
    """Return a path of links so long that a check by path gives up before the kernel does."""
    part, members, path = "d" * 240, [], ""
    for letter in "abcdefghijklmnop":
        members += [Member(f"{path}{part}", tarfile.DIRTYPE), _link(f"{path}{letter}", part)]
        path += f"{part}/"
    chain = "/".join("abcdefghijklmnop")
    members += [_link(f"{chain}/{'l' * 254}", "../" * 16), _link("out", f"{chain}/{'l' * 254}/../../../..{outside}")]
    return [*members, Member("out/evil", content=b"evil")]


HOSTILE: dict[str, tuple[str, str, Callable[[str], Sequence[Member]]]] = {
    "dotdot": ("names with ..", "CVE-2007-4559", lambda out: [Member("../" * 20 + out[1:] + "/evil", content=b"evil")]),
    "absolute": ("absolute names", "CVE-2007-4559", lambda out: [Member(f"{out}/evil", content=b"evil")]),
    "symlink": (
        "a link out, then a file through it",
        "CVE-2018-1002200",
        lambda out: [_link("way", out), Member("way/evil", content=b"evil")],
    ),
    "link-chain": ("a chain of links too long to resolve", "CVE-2025-4517", _long_chain),
    "hard-link": (
        "a hard link to a file outside, then its content",
        "CVE-2025-4330",
        lambda out: [Member("secret", tarfile.LNKTYPE, link=f"{out}/secret"), Member("secret", content=b"evil")],
    ),
    "devices": (
        "nodes of a disk and of memory, a FIFO",
        "device access",
        lambda out: [Member("dev0", tarfile.BLKTYPE), Member("mem", tarfile.CHRTYPE), Member("fifo", tarfile.FIFOTYPE)],
    ),
    "setuid": ("setuid files", "setuid escalation", lambda out: [Member("bin/su", content=b"#!", mode=0o6755)]),
    "overlay-attributes": (
        "attributes and whiteouts that an overlay believes",
        "CVE-2023-0386",
        lambda out: [
            Member("dir", tarfile.DIRTYPE, headers=(("SCHILY.xattr.trusted.overlay.redirect", f"{out}"),)),
            Member("bin/cap", headers=(("SCHILY.xattr.security.capability", "\x01\x00\x00\x02\xff\xff\xff\xff"),)),
            Member("etc/.wh.passwd"),
        ],
    ),
    "members": (
        "more members than allowed",
        "archive bomb",
        lambda out: [Member(f"f{n}") for n in range(_MAX_MEMBERS)],
    ),
    "bytes": ("more bytes than allowed", "archive bomb", lambda out: [Member("big", content=bytes(MAX_BYTES + 1))]),
    "hole": (
        "a hole of a tebibyte in some hundred bytes",
        "archive bomb",
        lambda out: [
            Member("hole", headers=(("GNU.sparse.map", f"0,0,{1 << 40},0"), ("GNU.sparse.size", f"{1 << 40}")))
        ],
    ),
    "mount-points": (
        "links at every place where something is mounted",
        "CVE-2021-30465",
        lambda out: [_link(name, out) for name in ("proc", "dev", "sys", "tmp", "run", "workspace", "home")],
    ),
    "libraries": (
        "libraries and modules that PID 1 would load",
        "CVE-2019-14271",
        lambda out: [
            Member(f"{place}/{name}", content=b"evil")
            for place in ("lib", "lib64", "usr/lib", "usr/lib/python3")
            for name in ("libnss_files.so.2", "libc.so.6", "encodings/__init__.py", "os.py")
        ],
    ),
}
"""Archives by name: a description, the weakness it stands for, and the members for a directory outside."""


async def _import(field: Field, members: Sequence[Member], name: str) -> Answers:
    before = await trio.to_thread.run_sync(tree, field.outside)
    said = await trio.to_thread.run_sync(_try, field, members, name)
    if said == "imported":
        said = await _use(field, name)
    after = await trio.to_thread.run_sync(tree, field.outside)
    return {"import": said, "outside": "harmless" if after == before else f"changed: {sorted(after)}"}


def _try(field: Field, members: Sequence[Member], name: str) -> str:
    catalog, tar = Catalog(field.config.data_dir), field.config.data_dir / f"{name}.tar"
    try:
        tar.write_bytes(make_tar([*_ROOT, *members]))
        import_tar(catalog, name, tar, max_members=_MAX_MEMBERS, max_bytes=MAX_BYTES)
    except InvalidImage:
        return "refused"
    finally:
        tar.unlink()
    wrong = find_wrong(catalog.trees(name)[0])
    return f"left {', '.join(wrong)}" if wrong else "imported"


async def _use(field: Field, name: str) -> str:
    """Make a session of the imported image: either it sees nothing of the host, or none is made."""
    try:
        session = await field.supervisor.create(SessionSpec(image=name))
    except SandkastenError:
        return "harmless"
    try:
        async with field.supervisor.files(session.id).open_read("/workspace/secret", max_bytes=4096) as reader:
            content = b"".join([piece async for piece in reader])
    except SandkastenError:
        content = b""
    finally:
        with trio.move_on_after(30 * field.patience, shield=True):
            await field.supervisor.destroy(session.id)
    return "a session saw the host's file" if CANARY.encode() in content else "harmless"


def make_tar(members: Sequence[Member]) -> bytes:
    """Return an archive of these members."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in members:
            info = tarfile.TarInfo(each.name)
            info.type, info.mode, info.linkname = each.kind, each.mode, each.link
            info.pax_headers = dict(each.headers)
            info.devmajor, info.devminor, info.size = 8, 0, len(each.content)
            archive.addfile(info, io.BytesIO(each.content))
    return content.getvalue()


def tree(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory with its content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def find_wrong(root: Path) -> list[str]:
    """Return forbidden traits of an unpacked tree: devices, privileged bits, attributes of overlays, capabilities."""
    wrong = []
    for directory, names, files in os.walk(root):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            is_whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0  # it hides a name in layers below
            is_device = stat.S_ISBLK(status.st_mode) or (stat.S_ISCHR(status.st_mode) and not is_whiteout)
            if is_device or stat.S_ISFIFO(status.st_mode):
                wrong.append(f"node {name}")
            if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                wrong.append(f"setuid {name}")
            attributes = os.listxattr(path, follow_symlinks=False)
            wrong += [f"{each} {name}" for each in attributes if each.startswith(("trusted.", "security.capab"))]
    return wrong


def _attempt(name: str, what: str, stands_for: str, make: Callable[[str], Sequence[Member]]) -> Attempt:
    async def run(field: Field) -> Answers:
        return await _import(field, make(str(field.outside)), f"hostile-{name}")

    return attempt(f"archives.{name}", f"import an archive with {what}", stands_for, _HARMLESS, users=("",))(run)


ARCHIVES = tuple(_attempt(name, *each) for name, each in HOSTILE.items())
