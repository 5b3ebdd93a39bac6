"""Exception groups, taken apart where one actor's failure is judged."""

from __future__ import annotations

from typing import Any

import trio


def unwrap(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first leaf of a group that is not a cancellation."""
    for error in group.exceptions:
        leaf = unwrap(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(leaf, trio.Cancelled):
            return leaf
    return group
