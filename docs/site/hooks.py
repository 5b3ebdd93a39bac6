"""Hooks of mkdocs: links and anchors of the pages mean the same here and on a code host.

A page is at the same place in both, but for the directory `docs`, which is the top of the site. Pages and files outside
of it that pages link to (`OUTSIDE`) keep their paths. Sources: mkdocs' guide to plugins, "Events"; GitHub's rule for
the anchors of headings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "newsfragments/README.md"),
    *("config/sandkasten.example.yaml", "config/images/base.yaml", "config/windows/sandkasten-wsl.ps1"),
)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def anchor(heading: str, _separator: str = "-") -> str:
    """Return the anchor of a heading, in plain text."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def on_config(config: MkDocsConfig) -> None:
    """Have headings get a code host's anchors."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and files outside of the directory."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_rest: Any) -> str:
    """Write links for the places that their targets have in the site."""
    path = page.file.src_uri
    here = posixpath.dirname(path if path in OUTSIDE else f"docs/{path}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[1])).removeprefix("docs/")
        return posixpath.relpath(target, posixpath.dirname(path))

    return _LINK.sub(moved, markdown)
