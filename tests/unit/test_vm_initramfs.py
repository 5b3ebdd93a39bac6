"""The initial RAM disk of the test machine: what the kernel is given, checked by another implementation."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.vm.initramfs import archive, load_order


@pytest.mark.skipif(shutil.which("cpio") is None and shutil.which("busybox") is None, reason="needs cpio")
def test_the_archive_is_read_by_cpio(tmp_path: Path) -> None:
    """Names, contents of any length and modes arrive, and directories are there before what lies in them."""
    files = {"init": b"#!/bin/sh\n", "bin/busybox": bytes(range(256)) * 3, "modules/a/b.ko": b""}
    program = ["cpio"] if shutil.which("cpio") else ["busybox", "cpio"]
    subprocess.run([*program, "-i", "-d"], cwd=tmp_path, input=archive(files), check=True, capture_output=True)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == files.keys()
    for name, content in files.items():
        assert (tmp_path / name).read_bytes() == content
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o755


def test_modules_come_after_what_they_need() -> None:
    """Once each, and a module that the kernel has built in is no error."""
    modules_dep = "k/b.ko: k/a.ko k/ring.ko\nk/ring.ko:\nk/a.ko: k/ring.ko\nk/net.ko: k/b.ko k/a.ko k/ring.ko\n"
    assert load_order(modules_dep, ["b", "ext4", "net"]) == ["k/ring.ko", "k/a.ko", "k/b.ko", "k/net.ko"]
