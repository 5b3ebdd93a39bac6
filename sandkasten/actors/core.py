"""The one mailbox loop: `Actor`, its address `Ref`, messages (`Ask`, `Tell`) and one-shot replies.

An actor owns its state: only its own tasks touch it. Others hold a `Ref` and send frozen messages. Mailboxes are
bounded. A handler answers at once, hands the answer to a child task (`defer`), or awaits when no message may overtake
the one it handles. While an actor waits for a message, some messages are served in the task of their sender
(`handle_at_once`). When an actor ends, every message in its mailbox and every deferred answer fails: no asker waits for
ever.

Asks go down the tree only; see docs/architecture.md. Vocabulary after Erlang/OTP's gen_server.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, Generic, TypeVar, TypeVarTuple

import attrs
import trio

from sandkasten import logcontext
from sandkasten.errors import ActorGone, Overloaded, SandkastenError

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
Ts = TypeVarTuple("Ts")

MAILBOX_MESSAGES = 512
"""Bound of every mailbox; a full one raises `Overloaded` in the sender."""

CLEANUP_S = 20.0
"""Longest time for an actor's clean-up; the rest is left to the reaper."""


RESTART_PATIENCE_S = 5.0
"""Longest time for which `ask_again` waits for a restarted actor."""

_RESTART_PAUSE_S = 0.05

AT_ONCE = 100
"""Sessions that are looked at before other tasks get a turn: some 0.3 ms."""


@attrs.frozen
class Ask(Generic[R_co]):
    """A message that is answered with an `R_co`."""


@attrs.frozen
class Tell:
    """A message without an answer."""


async def by_turns(call: Callable[[T], R], values: Iterable[T], *, at_once: int = AT_ONCE) -> list[R]:
    """Call `call` with each value, and let other tasks go on after each `at_once` of them; return its answers."""
    answers = []
    for number, value in enumerate(values, start=1):
        answers.append(call(value))
        if number % at_once == 0:
            await trio.lowlevel.checkpoint()
    return answers


class Deferred:
    """Type of `DEFERRED`: the answer comes later, from a child task."""


DEFERRED: Final = Deferred()


class Later:
    """Type of `LATER`: the message goes through the mailbox."""


LATER: Final = Later()


class Reply(Generic[R]):
    """A one-shot answer. The first `set` or `fail` counts, later ones are ignored.

    An answer that owns a resource has a method `close_unused`, which is called when the asker has gone.
    """

    __slots__ = ("_done", "_error", "_is_abandoned", "_value")

    def __init__(self) -> None:
        self._done = trio.Event()
        self._value: R | None = None
        self._error: SandkastenError | None = None
        self._is_abandoned = False

    def set(self, value: R) -> None:
        """Answer with `value`."""
        if self._done.is_set() or self._is_abandoned:
            _close_unused(value)
        else:
            self._value = value
            self._done.set()

    def abandon(self) -> None:
        """Close the answer when it comes: its only asker was cancelled."""
        self._is_abandoned = True
        value, self._value = self._value, None
        _close_unused(value)

    def fail(self, error: SandkastenError) -> None:
        """Answer with an error, raised in the asker."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    async def wait_done(self) -> None:
        """Wait until there is an answer, whatever it is."""
        await self._done.wait()

    async def wait(self) -> R:
        """Wait for the answer. Cancelling this drops the answer, not the work. An answer that is there already costs no
        turn of the event loop."""
        if self._done.is_set():
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set() stored an R


def _close_unused(value: object) -> None:
    close = getattr(value, "close_unused", None)
    if close is not None:
        close()


@attrs.frozen
class _Envelope:
    message: Any  # a member of the actor's message union
    reply: Reply[Any] | None  # the ask's answer type
    origin: logcontext.Origin = attrs.field(factory=logcontext.origin.get)


def _not_noted() -> None:
    """Do nothing: nobody observes the mailbox."""


def _no_error() -> None:
    """An actor that its supervisor restarts: the end of one incarnation is not the end."""


async def _as_it_is(error: SandkastenError) -> SandkastenError:
    return error


class Ref:
    """The address of an actor. It stays the same when its supervisor restarts the actor behind it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 0
        """Number of actors that have answered at this address."""
        self.end_error: Callable[[], SandkastenError | None] = _no_error
        """Returns the error of a request to an actor that has ended for good, or None while the actor lives."""
        self.translate: Callable[[SandkastenError], Awaitable[SandkastenError]] = _as_it_is
        """Translates an error that came of work with a resource which the actor lent; see `Actor.translate`."""
        self._note_message: Callable[[], None] = _not_noted
        self._outbox: trio.MemorySendChannel[_Envelope] | None = None
        self._step: Callable[[Any, Reply[Any]], bool] | None = None  # the actor's message union and answer types

    def __repr__(self) -> str:
        return f"<Ref {self.name}>"

    def speak_for(
        self,
        *,
        end_error: Callable[[], SandkastenError | None],
        translate: Callable[[SandkastenError], Awaitable[SandkastenError]],
    ) -> None:
        """Answer with these errors for an actor that is not restarted when it ends."""
        self.end_error, self.translate = end_error, translate

    def note_messages(self, note: Callable[[], None] = _not_noted) -> None:
        """Call `note` before each message is put into the mailbox, from now on."""
        self._note_message = note

    @property
    def is_alive(self) -> bool:
        """Whether an actor answers here at the moment."""
        return self._outbox is not None

    @property
    def waiting(self) -> int:
        """The messages in the mailbox."""
        return 0 if self._outbox is None else self._outbox.statistics().current_buffer_used

    async def ask(self, message: Ask[R]) -> R:
        """Send `message` and wait for its answer.

        Raises:
            Overloaded: the mailbox is full.
            ActorGone: no actor is running, or it ended before it answered.
            SandkastenError: whatever the handler raised.
        """
        reply: Reply[R] = Reply()
        self.post(message, reply)
        try:
            return await reply.wait()
        except trio.Cancelled:
            reply.abandon()
            raise

    async def ask_again(self, message: Ask[R], *, on: tuple[type[SandkastenError], ...] = ()) -> R:
        """Ask an actor that may be restarting: for some seconds again, whenever it is gone or fails with one of `on`.
        Only for requests that may be repeated. Raises as the last try."""
        give_up_at = trio.current_time() + RESTART_PATIENCE_S
        passing: tuple[type[SandkastenError], ...] = (ActorGone, *on)
        while True:
            try:
                return await self.ask(message)
            except passing:
                if trio.current_time() >= give_up_at:
                    raise
                await trio.sleep(_RESTART_PAUSE_S)

    def post(self, message: Ask[R], reply: Reply[R]) -> None:
        """Send `message` and have its answer put into `reply`, for which others may wait as well. Raises as `tell`."""
        if self._step is None or not self._step(message, reply):
            self._post(_Envelope(message, reply))

    def tell(self, message: Tell | Ask[Any]) -> None:
        """Send `message` without waiting. Raises `Overloaded` or `ActorGone`; never blocks."""
        self._post(_Envelope(message, None))

    def _post(self, envelope: _Envelope) -> None:
        if self._outbox is None:
            raise self.end_error() or ActorGone(f"{self.name} is not running")
        self._note_message()
        try:
            self._outbox.send_nowait(envelope)
        except trio.WouldBlock:
            raise Overloaded(f"{self.name} has too many requests waiting") from None
        except trio.BrokenResourceError:
            raise (self.end_error() or ActorGone(f"{self.name} has ended")) from None

    def _bind(
        self,
        outbox: trio.MemorySendChannel[_Envelope] | None,
        step: Callable[[Any, Reply[Any]], bool] | None = None,  # the actor's message union and answer types
    ) -> None:
        self.incarnation += outbox is not None
        self._outbox, self._step = outbox, step


class Actor:
    """Base of all actors: one mailbox, one nursery, one owner of the state.

    Subclasses implement `handle`, `handle_at_once` or both and, where needed, `on_start` and `on_stop`.
    `nursery.start(actor.run)` runs an actor and returns its `Ref`.
    """

    def __init__(self, ref: Ref) -> None:
        self.ref = ref
        self._nursery: trio.Nursery
        self._current: Reply[Any] | None = None
        self._is_stopping = self._is_stepping = False

    async def handle(self, message: Any) -> Any:  # the subclass names its message union and answer types
        """Serve one message and return the answer, or `DEFERRED`. An actor that never waits here overrides
        `handle_at_once` instead."""
        if (answer := self.handle_at_once(message)) is LATER:
            raise NotImplementedError
        return answer

    def handle_at_once(self, message: Any) -> Any:  # the subclass names its message union and answer types
        """Serve one message without waiting and return the answer or `DEFERRED`, or do nothing and return `LATER`.

        Called in the task of the sender, and only while `run` waits for a message, so that no message is overtaken. May
        not stop the actor.
        """
        return LATER

    async def on_start(self) -> None:
        """Acquire the actor's resources; messages wait meanwhile."""

    async def on_stop(self) -> None:
        """Release the actor's resources. Runs shielded, for at most `CLEANUP_S` seconds."""

    def gone(self) -> SandkastenError:
        """The error of a message that came too late."""
        return ActorGone(f"{self.ref.name} has ended")

    async def translate(self, error: SandkastenError) -> SandkastenError:
        """Return the error that an asker gets when a handler, or work that it deferred, ended with `error`."""
        return error

    def stop(self) -> None:
        """End the loop after the message being handled."""
        self._is_stopping = True

    def defer(self, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> Deferred:
        """Answer the message being handled with the result of `work(*args)`, run as a child task."""
        self._nursery.start_soon(self._run_deferred, self._current, work, args)
        return DEFERRED

    async def run(self, *, task_status: trio.TaskStatus[Ref] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the mailbox until `stop`, cancellation, or a bug in a handler. Raises the bug, for the supervisor."""
        outbox, inbox = trio.open_memory_channel[_Envelope](MAILBOX_MESSAGES)
        self._context = trio.lowlevel.current_task().context
        self.ref._bind(outbox, partial(self._step, outbox))
        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                self._nursery = nursery
                await self.on_start()
                logcontext.origin.set(logcontext.NOBODY)
                task_status.started(self.ref)
                while not self._is_stopping:
                    await self._dispatch(await inbox.receive())
                nursery.cancel_scope.cancel()
        finally:
            self._is_stopping = True  # also after a bug: what others end later, when the record is final, is no news
            self.ref._bind(None)
            outbox.close()
            try:
                with trio.move_on_after(CLEANUP_S, shield=True) as scope:
                    await self.on_stop()
                if scope.cancelled_caught:
                    log.error("actor_cleanup_timed_out", extra={"actor": self.ref.name})
            finally:
                self._drain(inbox)

    async def _dispatch(self, envelope: _Envelope) -> None:
        self._current = envelope.reply
        logcontext.origin.set(envelope.origin)
        try:
            answer = await self.handle(envelope.message)
        except SandkastenError as error:
            await self._refuse(envelope.reply, error, envelope.message)
        except BaseException:
            self._fail(envelope.reply, self.gone(), envelope.message)
            raise
        else:
            if answer is not DEFERRED and envelope.reply is not None:
                envelope.reply.set(answer)
        finally:
            self._current = None

    def _step(self, outbox: trio.MemorySendChannel[_Envelope], message: Any, reply: Reply[Any]) -> bool:
        """Serve a message in the task of its sender, if `run` waits for one. Return whether the message was served.

        A switch to the actor's task and back costs more than most messages. The step runs in the actor's context, as
        do the tasks that it starts.
        """
        if self._is_stepping or not outbox.statistics().tasks_waiting_receive:
            return False
        self._is_stepping = True
        try:
            return self._context.run(self._serve_at_once, message, reply, logcontext.origin.get())
        finally:
            self._is_stepping = False

    def _serve_at_once(self, message: Any, reply: Reply[Any], origin: logcontext.Origin) -> bool:
        self._current = reply
        logcontext.origin.set(origin)
        try:
            answer = self.handle_at_once(message)
        except SandkastenError as error:
            self._nursery.start_soon(self._refuse, reply, error, message)
        except Exception as bug:  # noqa: BLE001  # the actor's, whose supervisor gets it, and not the sender's
            self._fail(reply, self.gone(), message)
            self._nursery.start_soon(_raise, bug)
        else:
            if answer is LATER:
                return False
            if answer is not DEFERRED:
                reply.set(answer)
        finally:
            self._current = None
        return True

    async def _run_deferred(
        self, reply: Reply[Any] | None, work: Callable[..., Awaitable[object]], args: tuple[Any, ...]
    ) -> None:
        try:
            answer = await work(*args)
        except SandkastenError as error:
            await self._refuse(reply, error, _name_of(work))
        except BaseException:
            self._fail(reply, self.gone(), _name_of(work))
            raise
        else:
            if reply is not None:
                reply.set(answer)

    async def _refuse(self, reply: Reply[Any] | None, error: SandkastenError, what: object) -> None:
        try:
            error = await self.translate(error)
        finally:  # cancelled: the error goes out untranslated
            self._fail(reply, error, what)

    def _fail(self, reply: Reply[Any] | None, error: SandkastenError, what: object) -> None:
        if reply is not None:
            reply.fail(error)
        else:
            label = what if isinstance(what, str) else type(what).__name__
            log.warning("message_failed", extra={"actor": self.ref.name, "what": label, "error": repr(error)})

    def _drain(self, inbox: trio.MemoryReceiveChannel[_Envelope]) -> None:
        while True:
            try:
                envelope = inbox.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel):
                break
            if envelope.reply is not None:
                envelope.reply.fail(self.gone())
        inbox.close()


async def _raise(bug: BaseException) -> None:
    raise bug


def _name_of(work: Callable[..., object]) -> str:
    """Return the name of `work` for the log; a `functools.partial` has none of its own."""
    return str(getattr(work, "__name__", work))


def unwrap(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first leaf of a group that is not a cancellation."""
    for error in group.exceptions:
        leaf = unwrap(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(leaf, trio.Cancelled):
            return leaf
    return group
