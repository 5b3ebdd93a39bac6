"""Links between the documents lead somewhere, on a code host and in the site that `make docs` builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def _load_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


anchor = _load_hooks().anchor


def pages(top: Path) -> list[Path]:
    """Return the pages of the documentation below the top of a checkout."""
    return [*top.glob("*.md"), *(top / "docs").rglob("*.md"), *(top / "newsfragments").glob("README.md")]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, of several like headings with a number behind."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name, number = anchor(plain), 0
        while (name if not number else f"{name}-{number}") in found:
            number += 1
        found.add(name if not number else f"{name}-{number}")
    return found


def broken(top: Path) -> Iterator[str]:
    """Yield each relative link to a file or a heading that there is not."""
    for page in pages(top):
        for path, heading in _LINK.findall(_FENCE.sub("", page.read_text())):
            target = page.parent / path if path else page
            if not target.exists() or (heading and heading not in anchors(target)):
                yield f"{page.relative_to(top)}: {path}{heading and '#'}{heading}"


def test_links_lead_somewhere_on_a_code_host() -> None:
    """To files and headings, from every page."""
    assert list(broken(ROOT)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """A file, a heading here and one elsewhere that there are not; not what only looks like a link."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "# A `b`, c\n[x](docs/x.md#one-two) [x](#a-b-c) [x](https://example.org#y)\n"
        "[x](docs/y.md) [x](#a-b) [x](docs/x.md#one)\n```\n# One\n[x](z.md)\n```\n"
    )
    (tmp_path / "docs/x.md").write_text("# Two\n# One two\n# Two\n[x](#two-1) [x](#two-2)\n")
    assert list(broken(tmp_path)) == [
        *("README.md: docs/y.md", "README.md: #a-b", "README.md: docs/x.md#one"),
        "docs/x.md: #two-2",
    ]


class _Loaded(HTMLParser):
    """Collector of the files that a page makes a browser fetch, in `urls`."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "img": "src", "link": "href"}
        self.urls += [value for name, value in attrs if name == names.get(tag) and value is not None]


def test_the_site_is_built_without_a_warning_and_needs_no_other_site(tmp_path: Path) -> None:
    """A broken link or anchor, and a page that the navigation lacks, are warnings, and these are errors. Scripts,
    styles and pictures are files of the site."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(tmp_path.rglob("*.html"))
    assert len(built) > len(pages(ROOT)) - 3  # README.md and what is no page
    for page in built:
        loaded = _Loaded()
        loaded.feed(page.read_text())
        places = (tmp_path if url.startswith("/") else page.parent for url in loaded.urls)
        files = [place / url.partition("?")[0].lstrip("/") for place, url in zip(places, loaded.urls, strict=True)]
        assert [file for file in files if not file.is_file()] == []
