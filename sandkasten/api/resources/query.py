"""Fields of a query, one function per kind. A field that is there and bad is refused by name, never ignored."""

from __future__ import annotations

from sandkasten.api.http.exchange import Exchange
from sandkasten.model.errors import InvalidRequest


def query_integer(exchange: Exchange, name: str, *, default: int, low: int = 1, high: int) -> int:
    """Return an integer from `low` to `high`. Raises `InvalidRequest`."""
    text = exchange.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 18 and low <= int(text) <= high):
        raise bad_query(name, f"must be an integer between {low} and {high}")
    return int(text)


def query_choice(exchange: Exchange, name: str, *choices: str) -> str | None:
    """Return one of `choices`, or None if the field is not there. Raises `InvalidRequest`."""
    text = exchange.query.get(name)
    if text is not None and text not in choices:
        raise bad_query(name, f"must be one of {', '.join(choices)}")
    return text


def query_flag(exchange: Exchange, name: str) -> bool:
    """Return whether `true` was said. Raises `InvalidRequest`."""
    return query_choice(exchange, name, "true", "false") == "true"


def bad_query(name: str, problem: str) -> InvalidRequest:
    """Return the refusal of one field."""
    return InvalidRequest("the query has bad fields", **{name: problem})
