"""Packing of the attempts made inside into one file that a session's own Python runs.

The packed modules import the standard library alone, and each other by their names here.
"""

from __future__ import annotations

import io
import zipfile
from importlib import resources

_PACKAGE = "sandkasten.security.probes"
_MAIN = f"import sys\nfrom {_PACKAGE}.driver import main\nmain(sys.argv[1:])\n"
_TIME = (1980, 1, 1, 0, 0, 0)


def pack_probes() -> bytes:
    """Return a zip file for `python3 FILE TARGET NAME…`; the same bytes each time."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", _TIME), _MAIN)
        for package in ("sandkasten", "sandkasten/security"):
            archive.writestr(zipfile.ZipInfo(f"{package}/__init__.py", _TIME), "")
        for each in sorted(resources.files(_PACKAGE).iterdir(), key=lambda each: each.name):
            if each.name.endswith(".py"):
                name = zipfile.ZipInfo(f"{_PACKAGE.replace('.', '/')}/{each.name}", _TIME)
                archive.writestr(name, each.read_bytes())
    return content.getvalue()
