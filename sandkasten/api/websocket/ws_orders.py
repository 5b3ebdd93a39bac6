"""The orders that a client gives to one run: signals and sizes one after the other, cancellations beside them.

A cancellation lasts until the run has ended, so it holds up no other order: a second one (`now`) or a signal comes
through while the first still gives the run time. Bounded; nothing of it outlives `settle`. Knows no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio

from sandkasten.model.errors import ExecNotFound, Overloaded, SandkastenError

MAX_ORDERS = 32
"""Orders to one run that are not carried out yet."""

UNKNOWN_S = 0.02
"""How often an order for a run that is being started is tried."""

LAST_ORDERS_S = 1.0
"""How long orders may take that were given before the channel's end."""

Order = Callable[[], Awaitable[object]]
_Queue = deque[tuple[str, Order]]


class Orders:
    """See the module's docstring. `known` is set once the supervisor knows the run, or never will."""

    def __init__(
        self, nursery: trio.Nursery, known: trio.Event, *, refuse: Callable[[SandkastenError, str], None]
    ) -> None:
        """`refuse(error, kind)` is called for an order that was not carried out."""
        self._nursery = nursery
        self._known = known
        self._refuse = refuse
        self._queue: _Queue = deque()
        self._scopes: set[trio.CancelScope] = set()
        self._pending = 0
        self._done = trio.lowlevel.ParkingLot()
        self._is_stopped = False

    def add(self, kind: str, order: Order, *, lasts: bool = False) -> bool:
        """Have something done to the run, behind what was ordered before, or, if it `lasts`, beside that.

        Never waits. Returns whether it was taken.
        """
        if self._pending >= MAX_ORDERS:
            self._refuse(Overloaded("too many orders wait"), kind)
            return False
        self._pending += 1
        queue: _Queue = deque() if lasts else self._queue
        queue.append((kind, order))
        if len(queue) == 1:  # what is being carried out is still in it
            self._nursery.start_soon(self._obey_all, queue)
        return True

    async def settle(self) -> None:
        """Let what was ordered be done, within `LAST_ORDERS_S`, and leave the rest; nothing is refused any more."""
        with trio.move_on_after(LAST_ORDERS_S):
            while self._pending:
                await self._done.park()
        self._is_stopped = True
        for scope in self._scopes:
            scope.cancel()

    async def _obey_all(self, queue: _Queue) -> None:
        if self._is_stopped:
            return
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            while queue:
                kind, order = queue[0]
                try:
                    await self._obey(order)
                except SandkastenError as error:
                    self._tell(error, kind)
                queue.popleft()
                self._pending -= 1
                self._done.unpark_all()
        self._scopes.discard(scope)

    async def _obey(self, order: Order) -> None:
        """Carry out an order that may come before the supervisor has heard of the run."""
        while True:
            try:
                await order()
                return
            except ExecNotFound:
                if self._known.is_set():
                    raise
            with trio.move_on_after(UNKNOWN_S):
                await self._known.wait()

    def _tell(self, error: SandkastenError, kind: str) -> None:
        if not self._is_stopped:
            self._refuse(error, kind)
