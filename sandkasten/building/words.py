"""Words of an instruction: how they are split, and what variables and quotes in them become.

Source: the Dockerfile reference (docs.docker.com/reference/dockerfile), "Environment replacement" and "escape".
"""

from __future__ import annotations

import re
from collections.abc import Callable

Lookup = Callable[[str], str | None]
"""Returns the value of a variable, or None."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]")
_BLANK = " \t"
_DEEPEST = 32


def split(text: str, escape: str) -> list[str]:
    """Return the words between blanks; quotes and escapes, which stay in the words, keep blanks within."""
    words: list[str] = []
    word, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at += 2
            continue
        if char in _BLANK and not quote:
            if word:
                words.append(word)
            word = ""
        else:
            if quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            word += char
        at += 1
    return [*words, word] if word else words


def expand(text: str, lookup: Lookup, escape: str) -> str:
    """Return a text with its variables replaced, and without its quotes and escapes.

    Raises:
        ValueError: a quote or brace is open, a variable is malformed, or one that must have a value has none.
    """
    return _Expansion(text, lookup, escape).until("")


def expand_document(text: str, lookup: Lookup, escape: str) -> str:
    """Return a here-document with its variables replaced; quotes are text. Raises `ValueError` as `expand`."""
    return _Expansion(text, lookup, escape).quoted("")


class _Expansion:
    """One pass over a text; `_at` is the next character."""

    def __init__(self, text: str, lookup: Lookup, escape: str) -> None:
        self._text, self._lookup, self._escape = text, lookup, escape
        self._at = self._depth = 0

    def until(self, end: str) -> str:
        """Return what stands before `end`, expanded, and step behind it; empty: the end of the text."""
        found = ""
        while self._at < len(self._text):
            char = self._take()
            if char == end:
                return found
            match char:
                case "'":
                    found += self._literal()
                case '"':
                    found += self.quoted('"')
                case "$":
                    found += self._variable()
                case self._escape:
                    found += self._take() if self._at < len(self._text) else char
                case _:
                    found += char
        if end:
            raise ValueError(f"a {end} is missing")
        return found

    def _take(self) -> str:
        self._at += 1
        return self._text[self._at - 1]

    def _literal(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise ValueError("a ' is missing")
        found, self._at = self._text[self._at : end], end + 1
        return found

    def quoted(self, end: str) -> str:
        """Return what stands before `end`, where blanks and other quotes are text; empty: the end of the text."""
        found = ""
        while self._at < len(self._text):
            char = self._take()
            if char == end:
                return found
            if char == "$":
                found += self._variable()
            elif char == self._escape and self._at < len(self._text):
                after = self._take()
                found += after if after in (end, "$", self._escape) else char + after
            else:
                found += char
        if end:
            raise ValueError(f"a {end} is missing")
        return found

    def _variable(self) -> str:
        if self._text[self._at : self._at + 1] != "{":
            found = _NAME.match(self._text, self._at)
            if found is None:
                return "$"
            self._at = found.end()
            return self._lookup(found[0]) or ""
        found = _NAME.match(self._text, self._at + 1)
        if found is None:
            raise ValueError("a variable in ${} has no name")
        self._at = found.end()
        value = self._lookup(found[0])
        if self._text[self._at : self._at + 1] == "}":
            self._at += 1
            return value or ""
        counts_empty = self._text[self._at : self._at + 1] == ":"
        self._at += counts_empty
        sign = self._text[self._at : self._at + 1]
        if not sign:
            raise ValueError("a } is missing")
        if sign not in "-+?":
            raise ValueError(f"${{{found[0]}…}}: of the modifiers there are -, + and ?, with a colon or without")
        self._at += 1
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError("variables are nested too deeply")
        word = self.until("}")
        self._depth -= 1
        has_value = value is not None and not (counts_empty and not value)
        if sign == "+":
            return word if has_value else ""
        if has_value:
            return value or ""
        if sign == "?":
            raise ValueError(f"{found[0]}: {word or 'it has no value'}")
        return word
