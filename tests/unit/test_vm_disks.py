"""The key of the emulated machine's cached disk: what is installed, not what should be."""

from __future__ import annotations

from pathlib import Path

from tests.vm.disks import installed


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
    keys = {environment: installed(tmp_path / environment) for environment in environments}
    assert keys["whole"] == keys["same"] == keys["linked"]
    assert len(set(keys.values())) == 3
