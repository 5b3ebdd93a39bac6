"""The package as a library: its exports, and what a program of another event loop is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import sandkasten


def test_all_exports_are_shown_and_there() -> None:
    """`dir` names them before they are imported."""
    assert set(sandkasten.__all__) <= set(dir(sandkasten))
    assert all(getattr(sandkasten, name) is not None for name in sandkasten.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Sandbox'"):
        _ = sandkasten.Sandbox


def test_a_program_on_asyncio_is_told_what_to_do(tmp_path: Path) -> None:
    """Before anything is made, in words that name both ways."""

    async def main() -> None:
        async with sandkasten.open_supervisor(sandkasten.Config(data_dir=tmp_path / "data")):
            raise AssertionError("a supervisor on asyncio")

    with pytest.raises(RuntimeError, match=r'trio\.run\(main\).*backend="trio".*sandkasten serve'):
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
