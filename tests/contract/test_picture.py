"""The picture of the packages in docs/architecture.md is drawn from the imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_picture_shows_the_imports() -> None:
    """`python docs/picture.py` would change nothing; packages that import each other in a circle can't be drawn."""
    done = subprocess.run([sys.executable, "docs/picture.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run python docs/picture.py\n{done.stderr}"
