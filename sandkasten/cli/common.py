"""What a terminal gets of texts that come from the machine: a path may hold anything, and must not drive it. Pure."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with `?` in place of what is neither printable nor a line break."""
    return "\n".join(map(printable_line, text.split("\n")))


def printable_line(text: str) -> str:
    """Return a line with `?` in place of what is not printable."""
    return "".join(char if char.isprintable() else "?" for char in text)
