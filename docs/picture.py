"""Draws the packages of the project and their imports into docs/architecture.md: `python docs/picture.py`.

One box for each package, one arrow for each import of another package that no longer path already shows (the
transitive reduction), highest first. The drawing is Mermaid, between two marks in the page. `--check` writes nothing
and fails when the page shows something else; `tests/contract/test_written_docs.py` calls that. Raises
`graphlib.CycleError` where packages import each other in a circle.
"""

from __future__ import annotations

import graphlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- picture: begin -->\n", "<!-- picture: end -->\n"

DOMAINS = {
    "sandkasten": "sandkasten: the daemon, its command line, clients",
    "nsinit": "nsinit: privileged",
    "runner": "runner: PID 1 inside",
    "egress": "egress: the way out",
}
OPENED = {"sandkasten.actors": "tree", "sandkasten.api": "routes"}
"""Packages whose own packages are drawn, too, and the box of the modules that put these together."""

FOUNDATION = {"sandkasten.actors.core", "sandkasten.actors.supervision"}
"""Modules of an opened package on which its packages stand."""

Graph = Mapping[str, set[str]]


def package_of(module: str) -> str | None:
    """Return the box a module is drawn in; None for the top of a domain, which is all entry and no concept."""
    for opened, top in OPENED.items():
        if module.startswith(f"{opened}."):
            name = module.split(".")[2]
            is_package = (ROOT / opened.replace(".", "/") / name).is_dir()
            return f"{opened}.{name if is_package else 'core' if module in FOUNDATION else top}"
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1] != "__main__" else None


def packages() -> Graph:
    """Return each package with the packages it imports, type-only imports included."""
    modules = grimp.build_graph(*DOMAINS, exclude_type_checking_imports=False, cache_dir=None)
    found: dict[str, set[str]] = {}
    for module in sorted(modules.modules):
        importer = package_of(module)
        if importer is None or importer in OPENED:
            continue
        imported = {package_of(each) for each in modules.find_modules_directly_imported_by(module)}
        found.setdefault(importer, set()).update(name for name in imported if name and name != importer)
    return found


def reduced(graph: Graph) -> Graph:
    """Return the graph without arrows that a longer path shows."""
    order = tuple(graphlib.TopologicalSorter(graph).static_order())
    below: dict[str, set[str]] = {}
    for name in order:
        below[name] = set().union(*({each} | below[each] for each in graph.get(name, ())))
    return {
        name: {each for each in graph.get(name, ()) if not any(each in below[other] for other in graph[name])}
        for name in order
    }


def drawing() -> str:
    """Return the picture as a fenced Mermaid block."""
    return "```mermaid\n" + "\n".join(_lines(reduced(packages()))) + "\n```\n"


def _lines(graph: Graph) -> Iterator[str]:
    yield "flowchart TB"
    for domain, title in DOMAINS.items():
        yield f'  subgraph {domain}["{title}"]'
        for name in sorted(graph):
            if name.split(".")[0] == domain:
                yield f'    {name.replace(".", "_")}["{name.partition(".")[2]}"]'
        yield "  end"
    for name in sorted(graph):
        for imported in sorted(graph[name]):
            yield f"  {name.replace('.', '_')} --> {imported.replace('.', '_')}"


def main(arguments: list[str]) -> int:
    """Write the page, or check it; return the exit status."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page = before + BEGIN + drawing() + END + after
    if "--check" in arguments:
        return int(page != PAGE.read_text())
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
