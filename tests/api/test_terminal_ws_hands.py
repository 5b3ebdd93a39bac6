"""Control of a watched shell: taking it over, giving it back, and the notices to each viewer."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from sandkasten.model import ShellSpec, Stream, errors
from tests.api.harness import read_until, running_fake
from tests.api.terminal_screen import screen, terminal
from tests.api.ws_client import client_frame, handshake, make_session
from tests.fakes.readers import Viewer


async def test_a_watched_shell_is_taken_over_and_given_back() -> None:
    """Keys typed right behind the order reach the shell; before and after it the viewer only watches."""
    async with running_fake() as running:
        session_id = await make_session(running)
        await running.supervisor.open_shell(session_id, ShellSpec("agent"))
        async with screen(running, session_id, "?shell=agent") as view:
            assert view.ready["taken_over"] is False
            await view.type(b"x")
            refusal = await view.hear()
            assert isinstance(refusal, dict)
            assert refusal["refused"] == "input"
            await view.talk.say("take_over")
            await view.type(b"ls\n")
            assert await view.hear() == {"type": "taken_over"}
            await view.talk.say("give_back")
            assert await view.see(3) == b"ls\n"
            assert await view.hear() == {"type": "given_back"}
            assert terminal(running).stdin == b"ls\n"


async def test_giving_back_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the prompt shows something at its end, with which the change of hands is told already."""
    async with running_fake() as running, screen(running, query="?shell=default") as view:
        is_told = trio.Event()

        async def give_back(viewer: Viewer) -> None:
            viewer._run.takers.discard(viewer)
            viewer._run.write(Stream.STDOUT, b"[given back]")
            await is_told.wait()

        monkeypatch.setattr(Viewer, "give_back", give_back)
        for _ in range(2):
            await view.talk.say("take_over")
            assert await view.hear() == {"type": "taken_over"}
            await view.talk.say("give_back")
            assert await view.hear() == {"type": "given_back"}
            assert await view.see(12) == b"[given back]"
            is_told.set()
            assert await view.is_quiet()
        await view.talk.say("give_back")  # nothing is taken: no hands change, so what is shown may come before
        heard = [await view.hear(), await view.hear()]
        assert [each for each in heard if each != b"[given back]"] == [{"type": "given_back"}]


async def test_a_watched_shell_can_be_joined_by_the_id_it_opened_with() -> None:
    """`terminal_id` of `ready` is that of the view, whoever sits at the shell and whatever runs there."""
    async with running_fake() as running:
        session_id = await make_session(running)
        async with screen(running, session_id, "?shell=default") as first:
            query = f"?terminal_id={first.ready['terminal_id']}"
            async with screen(running, session_id, query) as second:
                terminal(running).write(Stream.STDOUT, b"seen by both")
                assert await first.see(12) == await second.see(12) == b"seen by both"


async def test_each_viewer_is_told_of_its_own_hands() -> None:
    """A viewer that only watches is not told that somebody types; the second one to take over gets an answer, too."""
    async with running_fake() as running:
        session_id = await make_session(running)
        async with screen(running, session_id, "?shell=default") as first:
            await first.talk.say("take_over")
            assert await first.hear() == {"type": "taken_over"}
            async with (
                screen(running, session_id, "?shell=default") as second,
                screen(running, session_id, "?shell=default&read_only=true") as third,
            ):
                assert (second.ready["taken_over"], third.ready["taken_over"]) == (False, False)
                await second.type(b"x")
                refusal = await second.hear()
                assert isinstance(refusal, dict)
                assert refusal["refused"] == "input"
                await second.talk.say("take_over")
                assert await second.hear() == {"type": "taken_over"}
                assert await third.is_quiet()


async def test_a_read_only_viewer_of_a_terminal_does_not_type() -> None:
    """`taken_over` is about who asks, not about the terminal."""
    async with running_fake() as running:
        session_id = await make_session(running)
        async with (
            screen(running, session_id) as owner,
            screen(running, session_id, f"?terminal_id={owner.ready['terminal_id']}&read_only=true") as view,
        ):
            assert (owner.ready["taken_over"], view.ready["taken_over"]) == (True, False)


async def test_what_is_typed_behind_the_end_of_a_prompt_is_refused() -> None:
    """The shell is only watched again, and whoever sat there is told before their keys are lost."""
    async with running_fake() as running, screen(running, query="?shell=default") as view:
        await view.talk.say("take_over")
        assert await view.hear() == {"type": "taken_over"}
        terminal(running).takers.clear()
        await view.type(b"lost")
        assert await view.hear() == {"type": "given_back"}
        refusal = await view.hear()
        assert isinstance(refusal, dict)
        assert (refusal["error_code"], refusal["refused"]) == ("PERMISSION_DENIED", "input")
        assert terminal(running).stdin == b""


async def test_a_shell_that_is_waited_for_can_be_given_back() -> None:
    """A viewer that stops waiting has not taken the shell, and its keys typed meanwhile are refused."""
    async with running_fake() as running:
        running.supervisor.take_over_turn = trio.Event()
        async with screen(running, query="?shell=default") as view:
            await view.talk.say("take_over")
            assert await view.is_quiet()
            await view.type(b"too early")
            await view.talk.say("give_back")
            heard = [await view.hear(), await view.hear()]
            assert [each.get("refused") for each in heard if isinstance(each, dict)].count("input") == 1
            assert {"type": "given_back"} in heard
            running.supervisor.take_over_turn.set()
            assert await view.is_quiet()
            assert not terminal(running).takers
            assert terminal(running).stdin == b""
            await view.talk.say("take_over")
            assert await view.hear() == {"type": "taken_over"}


async def test_taking_over_and_giving_back_in_one_breath_takes_nothing() -> None:
    """The answer to the second is the only one."""
    async with running_fake() as running, await running.connect() as stream:
        await stream.send_all(handshake(f"/v1/sessions/{await make_session(running)}/terminal/ws?shell=default"))
        await read_until(stream, b'"ready"')
        await stream.send_all(client_frame(1, b'{"type":"take_over"}') + client_frame(1, b'{"type":"give_back"}'))
        assert b'"taken_over"' not in await read_until(stream, b'"given_back"')
        assert terminal(running).takers == set()


async def test_a_shell_that_cannot_be_taken_over_stays_watched() -> None:
    """The refusal names the order."""
    async with running_fake() as running:
        running.supervisor.take_over_refusal = errors.ShellBusy("somebody sits there")
        async with screen(running, query="?shell=default") as view:
            await view.talk.say("take_over")
            refusal = await view.hear()
            assert isinstance(refusal, dict)
            assert (refusal["error_code"], refusal["refused"]) == ("SHELL_BUSY", "take_over")
