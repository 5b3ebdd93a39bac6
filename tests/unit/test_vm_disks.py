"""Disks of the emulated machine: its initial RAM disk, checked by another implementation, and the cached one's key."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.vm.disks import disk_version
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


def install(packages: Path, name: str, record: str) -> None:
    """Write the metadata of a distribution, as an installer does."""
    info = packages / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(record)


def test_a_partial_environment_has_another_key(tmp_path: Path) -> None:
    """Fewer distributions, or other files in one of them, make another key; another place of the same ones does not."""
    environments = {
        "whole": {"one": "one.py,sha256=aa,3\n", "two": "two.py,sha256=bb,3\n"},
        "same": {"two": "two.py,sha256=bb,3\n../../../bin/two,sha256=ee,9\n", "one": "one.py,sha256=aa,3\n"},
        "linked": {"one": "one.py,sha256=aa,3\n", "two": "two.py,sha256=bb,3\n", "sandkasten-runtime": "x.pth,,\n"},
        "partial": {"one": "one.py,sha256=aa,3\n"},
        "other": {"one": "one.py,sha256=aa,3\n", "two": "two.py,sha256=cc,3\n"},
    }
    for environment, records in environments.items():
        (tmp_path / environment).mkdir()
        for name, record in records.items():
            install(tmp_path / environment, name, record)
    keys = {environment: disk_version("bookworm", tmp_path / environment) for environment in environments}
    assert keys["whole"] == keys["same"] == keys["linked"]
    assert len(set(keys.values())) == 3
