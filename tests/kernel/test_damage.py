"""`image validate --deep`: files of layers that are not as they were unpacked."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from nsinit.storage.layers import OPAQUE
from sandkasten.cli.main import main
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from tests.kernel.test_hostile_archives import SHELL, Entries, entry, write

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

_MEMBERS: Entries = [
    *SHELL,
    entry("usr/lib", tarfile.DIRTYPE, uid=3, gid=4),
    entry("lib", tarfile.SYMTYPE, linkname="usr/lib"),
    entry("lib/by-a-link", content=b"there"),
    entry("lib", tarfile.DIRTYPE),
    entry("twice", content=b"first"),
    entry("second-name", tarfile.LNKTYPE, linkname="twice"),
    entry("twice", content=b"last", mode=0o4755),
    entry("made/way/for", content=b"x"),
    entry("made", content=b"a file"),
    entry("turned/.wh.gone"),
    entry("turned/.wh.back"),
    entry("turned/back/again", content=b"y"),
    entry("hides/.wh..wh..opq"),
    entry("hole", pax_headers={"GNU.sparse.map": "0,0,600000,0", "GNU.sparse.size": "600000"}),
    entry("n\udcff", content=b"\xff", mtime=1.5),
]
"""Members that take each other's place, or are met by a link."""


def _chmod(path: Path) -> None:
    path.chmod(0o644)


def _relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("usr")


def _byte(path: Path) -> None:
    status = path.stat()
    path.write_bytes(b"Last")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "twice": (_byte, "has another content, owner, mode or time"),
    "usr/lib": (_chmod, "has another content, owner, mode or time"),
    "bin/sh": (Path.unlink, "is missing"),
    "second-name": (lambda path: os.utime(path, ns=(0, 1)), "has another content, owner, mode or time"),
    "made": (lambda path: os.chown(path, 7, 7), "has another content, owner, mode or time"),
    "turned/new": (Path.mkdir, "was not in the archive"),
    "lib": (_relink, "has another content, owner, mode or time"),
    "hides": (lambda path: os.removexattr(path, OPAQUE), "does not hide any more what layers below have there"),
    "turned/gone": (Path.unlink, "is missing"),
}


def test_each_damage_to_a_layer_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer is whole as it was unpacked, whatever its members did to each other; and each change is told, alone: a
    byte with the time kept, a mode, an owner, a time, a target, what is gone, what is new, and a mark of overlayfs."""
    data_dir = tmp_path / "data"
    import_tar(Catalog(data_dir), "x", write(tmp_path / "x.tar", _MEMBERS))
    (layer,) = (data_dir / "layers").iterdir()

    def validated() -> list[str]:
        capsys.readouterr()
        status = main(["image", "validate", "x", "--deep", "--data-dir", str(data_dir)])
        lines = capsys.readouterr().out.splitlines()
        assert status == (lines != ["x: ok"])
        return [line.removeprefix(f"x: sha256:{layer.name[:12]}: ") for line in lines]

    assert validated() == ["x: ok"]
    told = []
    for name, (change, words) in DAMAGE.items():
        change(layer / "fs" / name)
        told.append(f"{name} {words}")
        assert sorted(line for line in validated() if not line.startswith("x: there is no shell")) == sorted(told)
    (layer / "listing").write_bytes(b"?\0")
    assert "listing is damaged: a field of no kind" in validated()
    (layer / "listing").unlink()
    assert "listing is missing, as in layers of an older version: pull or import it again" in validated()
