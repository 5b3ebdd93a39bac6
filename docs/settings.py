"""Writes the reference of settings: `python docs/settings.py`. `--check` writes nothing and fails where it would.

The tables in docs/configuration.md have a row for each setting. Name, type, default and bounds are those of the
classes in `sandkasten/config/values.py`; the sentence in the last column is kept as it stands in the page, its only
place. A new setting gets a row without a sentence, which a test refuses. config/sandkasten.example.yaml is written
from the same rows.
"""

from __future__ import annotations

import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from sandkasten.config import DEFAULT_DATA_DIR, MIB, Config
from sandkasten.config.files import env_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/configuration.md"
EXAMPLE = ROOT / "config/sandkasten.example.yaml"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"
_ROW = re.compile(r"^\| `([a-z0-9_.]+)`<br>.* \| (.*) \|$", re.MULTILINE)
_LINK, _REFERENCE = re.compile(r"\[([^\]]*)\]\([^)]*\)"), re.compile(r" \(\[[^\]]*\]\([^)]*\)\)")
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "text", Literal: "text", Path: "path", tuple: "list"}
_WIDTH = 110


@attrs.frozen
class Setting:
    """One setting. `default` is None where it is none, and is not yet as YAML spells it."""

    key: str
    type: str
    default: Any
    bounds: str

    @property
    def is_of_data_dir(self) -> bool:
        return isinstance(self.default, Path) and DEFAULT_DATA_DIR in self.default.parents

    @property
    def value(self) -> str:
        """The default as YAML spells it."""
        match self.default:
            case None:
                return ""
            case bool():
                return str(self.default).lower()
            case tuple():
                return f"[{', '.join(self.default)}]"
            case Mapping():
                return f"{{{', '.join(f'{name}: {value}' for name, value in self.default.items())}}}"
            case _ if self.is_of_data_dir:
                return f"<data_dir>/{self.default.relative_to(DEFAULT_DATA_DIR)}"
            case _:
                return str(self.default) or '""'

    @property
    def shown(self) -> str:
        """The default in the table; sizes in bytes also in MiB."""
        if not self.value:
            return "none"
        size = f" ({self.default // MIB} MiB)" if self.key.endswith("_bytes") else ""
        return f"`{self.value}`{size}"


def settings() -> Iterator[tuple[str, list[Setting]]]:
    """Yield each section with its settings; the settings of no section come first, under an empty name."""
    config = Config()
    hints = typing.get_type_hints(Config)
    sections = [field.name for field in attrs.fields(Config) if attrs.has(hints[field.name])]
    yield "", [_setting(field, hints, config, "") for field in attrs.fields(Config) if field.name not in sections]
    for name in sections:
        cls = hints[name]
        hints_inside = typing.get_type_hints(cls)
        yield name, [_setting(field, hints_inside, getattr(config, name), f"{name}.") for field in attrs.fields(cls)]


def _setting(field: attrs.Attribute[Any], hints: Mapping[str, Any], section: object, prefix: str) -> Setting:
    expected = hints[field.name]
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        expected = next(each for each in typing.get_args(expected) if typing.get_origin(each) is not Literal)
    kind = _TYPES.get(typing.get_origin(expected) or expected, "mapping")
    return Setting(prefix + field.name, kind, getattr(section, field.name), getattr(field.validator, "passes", ""))


def sentences(page: str) -> Mapping[str, str]:
    """Return the sentence of each setting in the page."""
    return dict(_ROW.findall(page))


def tables(said: Mapping[str, str]) -> str:
    """Return the tables, one for each section."""
    return "\n".join(
        "\n".join([f"### {f'`{section}`' if section else 'Outside of sections'}", "", *_table(rows, said), ""])
        for section, rows in settings()
    )


def _table(rows: list[Setting], said: Mapping[str, str]) -> Iterator[str]:
    yield "| setting, variable | type | default | bounds | meaning |"
    yield "|---|---|---|---|---|"
    for each in rows:
        names = f"`{each.key}`<br>`{env_name(each.key)}`"
        yield f"| {names} | {each.type} | {each.shown} | {each.bounds} | {said.get(each.key, '')} |"


def example(said: Mapping[str, str]) -> str:
    """Return the example file: each setting with its default, below its sentence."""
    return "\n".join(["# Every setting with its default; docs/configuration.md has their bounds.", *_example(said), ""])


def _example(said: Mapping[str, str]) -> Iterator[str]:
    for section, rows in settings():
        indent = "  " if section else ""
        if section:
            yield f"\n{section}:"
        for each in rows:
            plain = _LINK.sub(r"\1", _REFERENCE.sub("", said.get(each.key, ""))).replace("`", "")
            yield from textwrap.wrap(plain, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            mark = "# " if each.is_of_data_dir else ""
            yield f"{indent}{mark}{each.key.rpartition('.')[2]}: {each.value}".rstrip()


def main(arguments: list[str]) -> int:
    """Write page and example, or check them; return the exit status."""
    page = PAGE.read_text()
    said = sentences(page)
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = {PAGE: f"{before}{BEGIN}\n{tables(said)}\n{END}{after}", EXAMPLE: example(said)}
    if "--check" in arguments:
        silent = [each.key for _, rows in settings() for each in rows if not said.get(each.key)]
        changed = [str(path.relative_to(ROOT)) for path, text in wanted.items() if path.read_text() != text]
        for complaint in (*(f"{key}: no sentence" for key in silent), *(f"{path}: not as written" for path in changed)):
            print(complaint, file=sys.stderr)
        return int(bool(silent or changed))
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
