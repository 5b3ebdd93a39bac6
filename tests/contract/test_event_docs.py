"""docs/events.md, the list of fields and the calls that emit events say the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sandkasten.journal.fields import EVENT_FIELDS, MAX_DATA_BYTES
from sandkasten.journal.ring import MAX_READERS, MEMORY_EVENTS
from sandkasten.model import EventType

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/events.md").read_text()


def test_the_documented_types_and_fields_are_those_of_the_code() -> None:
    """Every type has a row, with its fields and no other."""
    documented = {
        name: frozenset(re.findall(r"`(\w+)`", fields))
        for name, fields in re.findall(r"^\| `([a-z.]+)` \| [^|]+ \| ([^|]+) \|$", TEXT, re.MULTILINE)
    }
    assert documented == {type.value: fields for type, fields in EVENT_FIELDS.items()}


def test_the_documented_bounds_are_those_of_the_code() -> None:
    """Numbers in prose go stale first."""
    assert f"The newest {MEMORY_EVENTS} are in memory" in TEXT
    assert f"At most {MAX_READERS} readers" in TEXT
    assert f"at most {MAX_DATA_BYTES / 1024} KiB" in TEXT


def emit_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of something named `emit` in the daemon, with the place it is at."""
    for path in sorted((ROOT / "sandkasten").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit":
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_field_that_is_emitted_is_documented() -> None:
    """An undocumented one would be dropped; it is found without running the line."""
    every_field = frozenset[str]().union(*EVENT_FIELDS.values())
    wrong = []
    for place, call in emit_calls():
        types = [
            each.attr for each in call.args if isinstance(each, ast.Attribute) and each.attr in EventType.__members__
        ]
        allowed = EVENT_FIELDS[EventType[types[0]]] if types else every_field
        wrong += [f"{place}: {each.arg}" for each in call.keywords if each.arg is not None and each.arg not in allowed]
    assert wrong == []
