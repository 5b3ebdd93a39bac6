"""The mailbox loop: answers, bounds, bugs, and that nobody who asked is left waiting."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from sandkasten import logcontext
from sandkasten.actors.core import LATER, MAILBOX_MESSAGES, Actor, Ask, Ref
from sandkasten.errors import ActorGone, Overloaded, SessionNotFound


@attrs.frozen
class Echo(Ask[str]):
    text: str


@attrs.frozen
class Slow(Ask[str]):
    """Answered by a child task, when told to."""


@attrs.frozen
class Refuse(Ask[None]):
    later: bool = False


@attrs.frozen
class Break(Ask[None]):
    pass


@attrs.frozen
class Stall(Ask[None]):
    pass


@attrs.frozen
class WhoAsks(Ask[str | None]):
    """Answered with the request that the actor believes to work for."""

    is_slow: bool = False


@attrs.frozen
class Stop(Ask[None]):
    pass


@attrs.frozen
class Quick(Ask[tuple[str, str | None]]):
    """Served in the sender's task if the actor waits; answered with the way it was served, and the request."""

    refuse: bool = False
    has_bug: bool = False


class Subject(Actor):
    def __init__(self, ref: Ref) -> None:
        super().__init__(ref)
        self.release = trio.Event()
        self.cleaned_up = False

    async def handle(self, message: object) -> Any:
        match message:
            case Echo(text):
                return text
            case Slow():
                return self.defer(self._slowly)
            case Refuse(later):
                return self.defer(partial(self._turn_down, "none")) if later else await self._turn_down("none")
            case Break():
                raise ZeroDivisionError
            case Stall():
                await self.release.wait()
            case WhoAsks(is_slow):
                return self.defer(self._who_asks) if is_slow else await self._who_asks()
            case Stop():
                self.stop()
            case Quick():
                return "mailbox", logcontext.origin.get().request_id
        return None

    def handle_at_once(self, message: object) -> Any:
        if not isinstance(message, Quick):
            return LATER
        if message.refuse:
            raise SessionNotFound("none")
        if message.has_bug:
            raise ZeroDivisionError
        return "at once", logcontext.origin.get().request_id

    async def _who_asks(self) -> str | None:
        await trio.lowlevel.checkpoint()
        return logcontext.origin.get().request_id

    async def _turn_down(self, why: str) -> None:
        raise SessionNotFound(why)

    async def _slowly(self) -> str:
        await self.release.wait()
        return "slow"

    async def on_stop(self) -> None:
        await trio.lowlevel.checkpoint()
        self.cleaned_up = True


async def test_an_ask_is_answered_with_what_the_handler_returns() -> None:
    """The plain case."""
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(Subject(Ref("subject")).run)
        assert await ref.ask(Echo("hello")) == "hello"
        nursery.cancel_scope.cancel()


async def test_a_deferred_answer_does_not_block_the_mailbox() -> None:
    """Long work runs beside the mailbox."""
    subject = Subject(Ref("subject"))
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(subject.run)
        answers: list[str] = []

        async def ask_slowly() -> None:
            answers.append(await ref.ask(Slow()))

        nursery.start_soon(ask_slowly)
        await trio.testing.wait_all_tasks_blocked()
        answers.append(await ref.ask(Echo("first")))
        subject.release.set()
        await trio.testing.wait_all_tasks_blocked()
        assert answers == ["first", "slow"]
        nursery.cancel_scope.cancel()


async def test_a_refusal_reaches_the_asker_and_the_actor_lives_on() -> None:
    """A `SandkastenError` is an answer, not a crash."""
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(Subject(Ref("subject")).run)
        for refuse in (Refuse(), Refuse(later=True)):
            with pytest.raises(SessionNotFound):
                await ref.ask(refuse)
        assert await ref.ask(Echo("alive")) == "alive"
        nursery.cancel_scope.cancel()


async def test_a_bug_ends_the_actor_and_answers_everyone_who_waits() -> None:
    """The asker, those in the mailbox and those deferred get `ActorGone`; the bug reaches the supervisor."""
    subject = Subject(Ref("subject"))
    gone: list[str] = []

    async def ask(ref: Ref, message: Ask[Any]) -> None:
        try:
            await ref.ask(message)
        except ActorGone:
            gone.append(type(message).__name__)

    async with trio.open_nursery() as askers:
        with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                ref: Ref = await nursery.start(subject.run)
                for message in (Slow(), Break(), Echo("too late")):
                    askers.start_soon(ask, ref, message)
                    await trio.lowlevel.checkpoint()
    assert sorted(gone) == ["Break", "Echo", "Slow"]
    assert subject.cleaned_up
    with pytest.raises(ActorGone):
        ref.tell(Echo("nobody"))


async def test_a_full_mailbox_is_said_and_never_blocks() -> None:
    """The bound is real: one more than it holds is refused at once."""
    subject = Subject(Ref("subject"))
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(subject.run)
        ref.tell(Stall())
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(MAILBOX_MESSAGES):
            ref.tell(Echo("queued"))
        with pytest.raises(Overloaded):
            ref.tell(Echo("one too many"))
        subject.release.set()
        nursery.cancel_scope.cancel()


async def test_cancelling_an_ask_drops_the_answer_and_not_the_work() -> None:
    """The handler runs to its end although nobody listens any more."""
    subject = Subject(Ref("subject"))
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(subject.run)
        with trio.move_on_after(0):
            await ref.ask(Slow())
        subject.release.set()
        assert await ref.ask(Echo("still here")) == "still here"
        nursery.cancel_scope.cancel()


async def test_messages_behind_a_stop_are_turned_down() -> None:
    """Messages that an actor did not serve before it stopped are answered with its `gone` error."""
    subject = Subject(Ref("subject"))
    outcome: list[str] = []

    async def ask(ref: Ref) -> None:
        try:
            await ref.ask(Echo("late"))
        except ActorGone:
            outcome.append("gone")

    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(subject.run)
        ref.tell(Stall())
        await trio.testing.wait_all_tasks_blocked()
        ref.tell(Stop())
        nursery.start_soon(ask, ref)
        await trio.testing.wait_all_tasks_blocked()
        subject.release.set()
    assert outcome == ["gone"]


async def test_an_actor_works_in_the_name_of_whoever_asks() -> None:
    """Each message brings the request it is part of, to the handler and to its child tasks; the next one its own."""
    logcontext.origin.set(logcontext.Origin("the one that started it"))
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(Subject(Ref("subject")).run)
        for request_id, is_slow in (("a", False), ("b", True), (None, False), ("c", True), (None, True)):
            logcontext.origin.set(logcontext.Origin(request_id))
            assert await ref.ask(WhoAsks(is_slow)) == request_id
        nursery.cancel_scope.cancel()


async def test_a_mailbox_says_how_much_waits_in_it() -> None:
    """A message that is being served is not counted. An address without an actor has nothing waiting."""
    subject = Subject(Ref("subject"))
    assert subject.ref.waiting == 0
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(subject.run)
        ref.tell(Stall())
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            ref.tell(Echo("waits"))
        assert ref.waiting == 3
        subject.release.set()
        await trio.testing.wait_all_tasks_blocked()
        assert ref.waiting == 0
        nursery.cancel_scope.cancel()


async def test_a_waiting_actor_is_stepped_by_the_sender() -> None:
    """In the name of the sender, whose own context stays as it is; a refusal is an answer here, too."""
    logcontext.origin.set(logcontext.Origin("the one that started it"))
    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(Subject(Ref("subject")).run)
        await trio.testing.wait_all_tasks_blocked()
        logcontext.origin.set(logcontext.Origin("a"))
        assert await ref.ask(Quick()) == ("at once", "a")
        assert logcontext.origin.get().request_id == "a"
        with pytest.raises(SessionNotFound):
            await ref.ask(Quick(refuse=True))
        assert await ref.ask(Echo("alive")) == "alive"
        nursery.cancel_scope.cancel()


async def test_no_message_is_overtaken_by_one_that_is_served_at_once() -> None:
    """Neither the message being handled, nor one that is on its way to the actor's task or in the mailbox."""
    subject = Subject(Ref("subject"))
    answers: list[object] = []

    async def ask(message: Ask[Any]) -> None:
        answers.append(await subject.ref.ask(message))

    async with trio.open_nursery() as nursery:
        ref: Ref = await nursery.start(subject.run)
        await trio.testing.wait_all_tasks_blocked()
        ref.tell(Echo("on its way"))
        assert await ref.ask(Quick()) == ("mailbox", logcontext.origin.get().request_id)
        ref.tell(Stall())
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, Quick())
        await trio.testing.wait_all_tasks_blocked()
        assert (answers, ref.waiting) == ([], 1)
        subject.release.set()
        await trio.testing.wait_all_tasks_blocked()
        assert answers == [("mailbox", logcontext.origin.get().request_id)]
        nursery.cancel_scope.cancel()


async def test_a_bug_met_in_the_senders_task_ends_the_actor_and_not_the_sender() -> None:
    """The sender is told that the actor is gone; the actor's supervisor gets the bug."""
    subject = Subject(Ref("subject"))
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            ref: Ref = await nursery.start(subject.run)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ActorGone):
                await ref.ask(Quick(has_bug=True))
    assert subject.cleaned_up
