"""OTP-style supervision: child specs, `one_for_one` restarts with intensity and back-off, ordered start and stop.

Children start in list order, each when the one before it is ready, and stop in reverse order, which a bare nursery
does not do. A child that fails while starting for the first time fails the supervisor, and one that is still starting
when the supervisor is cancelled is cancelled at once. A permanent child that ends later is restarted after a growing
pause; more than `intensity` restarts in `period_s` give the supervisor up, and a child may say that to restart it is
pointless (`GiveUp`).

Sources: Erlang/OTP `supervisor` behaviour (child spec, restart type, intensity and period).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import attrs
import trio

log = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 5.0
_STEADY_S = 30.0
"""The back-off of a child that ran this long begins anew."""


class GiveUp(Exception):
    """Raised by a child that it is pointless to restart, with the reason; the supervisor ends at once."""


class RestartIntensityExceeded(GiveUp):
    """Raised by a supervisor whose child kept failing; the supervisor's owner decides."""


class _Start(Protocol):
    async def __call__(self, *, task_status: trio.TaskStatus[Any]) -> None: ...


@attrs.frozen
class ChildSpec:
    """Description of one child. `start` is called anew for each incarnation and runs until the child ends.

    `permanent` children are always restarted, `transient` ones only after a failure, `temporary` ones never.
    `shutdown_s` bounds how long stopping waits for this child before it goes on to the next. A child that
    `may_keep_failing` is restarted without limit, after the back-off: the other children are of use without it.
    """

    id: str
    start: _Start
    restart: Literal["permanent", "transient", "temporary"] = "permanent"
    shutdown_s: float = 30.0
    may_keep_failing: bool = False


class _Child:
    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.scope = trio.CancelScope()  # shielded from the moment it has started
        self.ended = trio.Event()


class ChildSupervisor:
    """Runs children `one_for_one`; start it with `nursery.start(supervisor.run)`."""

    def __init__(self, specs: Sequence[ChildSpec], *, intensity: int = 5, period_s: float = 30.0) -> None:
        self._specs = specs
        self._intensity = intensity
        self._period_s = period_s
        self._restarts: deque[float] = deque()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the children in order, keep them running, stop them in reverse order when cancelled."""
        children: list[_Child] = []
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            try:
                for spec in self._specs:
                    child = _Child(spec)
                    children.append(child)
                    await nursery.start(self._keep, child)
                task_status.started()
                await trio.sleep_forever()
            finally:
                for child in reversed(children):
                    child.scope.cancel()
                    with trio.move_on_after(child.spec.shutdown_s, shield=True):
                        await child.ended.wait()
                    if not child.ended.is_set():
                        waited_s = child.spec.shutdown_s
                        log.error("child_did_not_stop", extra={"child": child.spec.id, "waited_s": waited_s})

    async def _keep(self, child: _Child, *, task_status: trio.TaskStatus[Any]) -> None:
        """Run one child through its incarnations. After the first start only `run` ends it, which keeps the order."""
        try:
            with child.scope:
                backoff_s = _BACKOFF_FIRST_S
                has_started = False
                while True:
                    began = trio.current_time()
                    status = _FirstStart(task_status, child.scope)
                    try:
                        await child.spec.start(task_status=status if not has_started else trio.TASK_STATUS_IGNORED)
                        failure: BaseException | None = None
                    except Exception as error:  # any bug of a child is a reason to restart it
                        if not has_started and not status.is_started:
                            raise
                        failure = error
                    has_started = True
                    if child.spec.restart == "temporary" or (child.spec.restart == "transient" and failure is None):
                        return
                    self._count_restart(child, failure)
                    backoff_s = _BACKOFF_FIRST_S if trio.current_time() - began > _STEADY_S else backoff_s
                    await trio.sleep(backoff_s)
                    backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
        finally:
            child.ended.set()

    def _count_restart(self, child: _Child, failure: BaseException | None) -> None:
        if (hopeless := _find_give_up(failure)) is not None:
            raise type(hopeless)(f"{child.spec.id}: {hopeless}") from failure
        log.error("child_ended", extra={"child": child.spec.id, "error": repr(failure)}, exc_info=failure)
        if child.spec.may_keep_failing:
            return
        now = trio.current_time()
        self._restarts.append(now)
        while self._restarts and self._restarts[0] < now - self._period_s:
            self._restarts.popleft()
        if len(self._restarts) > self._intensity:
            raise RestartIntensityExceeded(f"{child.spec.id}: more than {self._intensity} restarts") from failure


def _find_give_up(failure: BaseException | None) -> GiveUp | None:
    if isinstance(failure, BaseExceptionGroup):
        return next((found for inner in failure.exceptions if (found := _find_give_up(inner)) is not None), None)
    return failure if isinstance(failure, GiveUp) else None


class _FirstStart:
    """Pass `started` on once, remember that it came, and shield the child from then on."""

    def __init__(self, inner: trio.TaskStatus[Any], scope: trio.CancelScope) -> None:
        self._inner, self._scope = inner, scope
        self.is_started = False

    def started(self, value: Any = None) -> None:  # the value that the child hands back
        self.is_started = True
        self._inner.started(value)
        # The starting task may have been cancelled a moment before: then the child stays unshielded, to end as well.
        self._scope.shield = trio.current_effective_deadline() != -math.inf
