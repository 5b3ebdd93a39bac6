"""File rules of a session as a value. What they mean inside is `runner.shell.filerules`' business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs


def _strings(value: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


@attrs.frozen
class FileRules:
    """Where commands may read and execute, and where they may write: absolute paths inside, of what exists when the
    session is made; None: wherever they otherwise could. What is writable is readable."""

    readable: Sequence[str] | None = attrs.field(default=None, converter=_strings)
    writable: Sequence[str] | None = attrs.field(default=None, converter=_strings)


def file_rules(value: FileRules | Mapping[str, Any] | None) -> FileRules | None:  # Any: JSON
    """Return the rules, from the form in which they are stored, too."""
    return FileRules(**value) if isinstance(value, Mapping) else value
