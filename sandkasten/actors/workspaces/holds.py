"""Holds: the sessions, file accesses and changes that a workspace is held for, and which of them refuse which.

A hold is begun before anything is done with a workspace and ended when that is over. A session holds its workspace by
its record, from before its sandbox is built until after the sandbox is gone, so that the hold survives the daemon. A
create under way has a `Hold` until the record exists. `Use.refuses` is the one rule for both.

The order of `Holds.begin` decides: a hold is refused for the sake of holds begun before it. `Holds` is a plain object,
so that ending a hold is a line that can't fail. The workspaces actor reads it, adds the records, and decides.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import attrs
import trio

from sandkasten.model.workspace import EVERYWHERE, Within

T = TypeVar("T")


class Use(enum.Enum):
    """The purpose of a hold. The values of the first two are those of `WorkspaceMode`."""

    SHARED = "shared"
    """A session that shares it."""

    EXCLUSIVE = "exclusive"
    """A session that no other session may share it with."""

    FILES = "files"
    """Files are read or written without a session."""

    MAKE = "make"
    """The workspace is being made."""

    GROW = "grow"
    """The quota of the workspace is being raised."""

    CLAIM = "claim"
    """The workspace is to be deleted or replaced: no session, file access or change begins any more. Those begun before
    go on, so each step in the name of a claim checks for `HAVING` holds itself."""

    def refuses(self, earlier: Iterable[Use]) -> bool:
        """Whether a hold of this use may not begin beside these."""
        return not _REFUSED_BY[self].isdisjoint(earlier)


_REFUSED_BY = {
    Use.SHARED: {Use.EXCLUSIVE, Use.CLAIM},
    Use.EXCLUSIVE: {Use.SHARED, Use.EXCLUSIVE, Use.CLAIM},
    Use.FILES: {Use.CLAIM},
    Use.MAKE: {Use.CLAIM},
    Use.GROW: {Use.CLAIM, Use.MAKE, Use.GROW},
    Use.CLAIM: {Use.CLAIM, Use.MAKE, Use.GROW},
}

HAVING = (Use.SHARED, Use.EXCLUSIVE, Use.FILES)
"""Uses that need the workspace to stay as it is."""


@attrs.frozen
class Turn:
    """A place in the order of a claim's steps: after `before`, until `done`."""

    before: trio.Event
    done: trio.Event

    async def take(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something when its turn has come."""
        try:
            await self.before.wait()
            return await work()
        finally:
            self.done.set()


def _set_event() -> trio.Event:
    event = trio.Event()
    event.set()
    return event


@attrs.define(eq=False)
class Hold:
    """One hold on a workspace, for an asker to whom only workspaces with the labels `within` exist.

    A step that was begun in the name of a claim goes on when its caller is cancelled. Steps therefore take turns, and
    the end of the claim is the last of them: until then the workspace is refused to others.
    """

    workspace_id: str
    use: Use
    within: Within = EVERYWHERE
    _last: trio.Event = attrs.field(factory=_set_event, init=False)

    def next_turn(self) -> Turn:
        """Return the turn behind all turns given out before. It has to be taken."""
        turn = Turn(self._last, trio.Event())
        self._last = turn.done
        return turn


class Holds:
    """The holds of the node, except those by record, in the order in which they were begun."""

    def __init__(self) -> None:
        self._holds: dict[Hold, None] = {}

    def __contains__(self, hold: Hold) -> bool:
        return hold in self._holds

    def begin(self, hold: Hold) -> Hold:
        """Add a hold. The caller ends it in every case."""
        self._holds[hold] = None
        return hold

    def end(self, hold: Hold) -> None:
        """Take a hold away; more than once is fine."""
        self._holds.pop(hold, None)

    @contextmanager
    def taken(self, hold: Hold) -> Iterator[Hold]:
        """Have a hold for as long as the context lasts."""
        try:
            yield self.begin(hold)
        finally:
            self.end(hold)

    def before(self, hold: Hold) -> Sequence[Use]:
        """Return the uses of the holds on the same workspace that were begun earlier."""
        found = []
        for each in self._holds:
            if each is hold:
                break
            if each.workspace_id == hold.workspace_id:
                found.append(each.use)
        return found

    def count(self, workspace_id: str, uses: Sequence[Use]) -> int:
        """Return how many holds of these uses are on a workspace."""
        return sum(each.workspace_id == workspace_id and each.use in uses for each in self._holds)

    def forget(self, use: Use) -> None:
        """End every hold of a use."""
        self._holds = {each: None for each in self._holds if each.use is not use}
