"""Copies of an image's shells: which files get one, and when a copy is made anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsinit.storage import shells

ELF = b"\x7fELF of "


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "image" / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "image" / "bin").symlink_to("usr/bin")
    return tmp_path / "image"


def keep(root: Path) -> dict[str, bytes]:
    """Keep the shells of the image; return what was kept, by name."""
    fd = os.open(root, os.O_PATH)
    shells.keep(fd, str(root.parent / "shells"))
    os.close(fd)
    found = {}
    for path in (root.parent / "shells").iterdir():
        assert path.stat().st_mode & 0o777 == 0o111
        path.chmod(0o444)
        found[path.name] = path.read_bytes()
        path.chmod(0o111)
    return found


def make(path: Path, content: bytes, mode: int = 0o755) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def test_links_lead_to_files_of_the_image_alone(root: Path) -> None:
    """`sh` is a link to another shell, by an absolute or a relative path; one that leads out of the image leads into
    it."""
    make(root / "usr/bin/dash", ELF + b"dash")
    make(root.parent / "outside", ELF + b"outside")
    (root / "usr/bin/sh").symlink_to("/bin/dash")
    (root / "usr/bin/bash").symlink_to("../../../outside")
    (root / "usr/bin/busybox").symlink_to("/proc/self/exe")
    assert keep(root) == {"sh": ELF + b"dash", "dash": ELF + b"dash"}


def test_what_is_no_program_gets_no_copy(root: Path) -> None:
    """A script, which its interpreter must read; a FIFO, a directory, a file that cannot be executed, an empty one."""
    make(root / "usr/bin/sh", b"#!/bin/bash\n")
    os.mkfifo(root / "usr/bin/bash")
    make(root / "usr/bin/dash", ELF, 0o644)
    make(root / "usr/bin/busybox", b"")
    assert keep(root) == {}
    (root / "usr/bin/bash").unlink()
    (root / "usr/bin/bash").mkdir()
    assert keep(root) == {}


def test_a_copy_is_made_anew_when_the_shell_has_changed(root: Path) -> None:
    """By length or time; the old one stays what it is for sessions that have it."""
    shell, copy = root / "usr/bin/bash", root.parent / "shells/bash"
    make(shell, ELF + b"one")
    os.utime(shell, (9, 9))
    assert keep(root) == {"bash": ELF + b"one"}
    first = copy.stat().st_ino
    keep(root)
    assert copy.stat().st_ino == first
    make(shell, ELF + b"two")
    assert keep(root) == {"bash": ELF + b"two"}
    make(shell, ELF + b"three")
    os.utime(shell, (9, 9))
    assert keep(root) == {"bash": ELF + b"three"}
    assert copy.stat().st_mtime == 9
