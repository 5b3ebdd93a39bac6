"""The ids of runs that the server makes: a form of their own, which no client can choose. Pure.

So an id of that form that a client sends and no run has is known to have been used, without being remembered.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

_PREFIX: Final = "run-"
_MADE: Final = re.compile(r"run-[0-9a-f]{16}\Z")


def make_exec_id() -> str:
    """Return a new id."""
    return _PREFIX + secrets.token_hex(8)


def is_made(exec_id: str) -> bool:
    """Whether only the server makes such ids."""
    return _MADE.match(exec_id) is not None
