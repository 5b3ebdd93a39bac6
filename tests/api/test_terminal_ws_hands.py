"""Control of a watched shell: taking it over, giving it back, and the notices to each viewer."""

from __future__ import annotations

from sandkasten.config import Config
from sandkasten.model import ShellSpec, Stream
from tests.api.harness import read_until, running_front
from tests.api.terminal_screen import screen, terminal
from tests.api.ws_client import client_frame, exec_talk, handshake, is_quiet, make_session, started
from tests.fakes.runner import Script
from tests.waiting import until

OVER = b"\x1b[2m[given back]\x1b[0m\r\n"
"""Notice of the end of a prompt."""

COMMAND = b"\x1b[2m$ wait\x1b[0m\r\n"
QUEUE_LENGTH = Config().server.shell_queue_length


async def test_a_watched_shell_is_taken_over_and_given_back() -> None:
    """Keys typed right behind the order reach the shell; before and after it the viewer only watches."""
    async with running_front() as running:
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


async def test_giving_back_is_told_once() -> None:
    """Also when the prompt shows something at its end, with which the change of hands is told already."""
    async with running_front() as running, screen(running, query="?shell=default") as view:
        for _ in range(2):
            await view.talk.say("take_over")
            assert await view.hear() == {"type": "taken_over"}
            await view.talk.say("give_back")
            assert await view.hear() == {"type": "given_back"}
            assert await view.see(len(OVER)) == OVER
            assert await view.is_quiet()
        await view.talk.say("give_back")  # nothing is taken: no hands change
        assert await view.hear() == {"type": "given_back"}
        assert await view.is_quiet()


async def test_a_watched_shell_can_be_joined_by_the_id_it_opened_with() -> None:
    """`terminal_id` of `ready` is that of the view, whoever sits at the shell and whatever runs there."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with screen(running, session_id, "?shell=default") as first:
            query = f"?terminal_id={first.ready['terminal_id']}"
            async with screen(running, session_id, query) as second:
                await first.talk.say("take_over")
                assert await first.hear() == {"type": "taken_over"}
                terminal(running).write(Stream.STDOUT, b"seen by both")
                assert await first.see(12) == await second.see(12) == b"seen by both"


async def test_each_viewer_is_told_of_its_own_hands() -> None:
    """A viewer that only watches is not told that somebody types; the second one to take over gets an answer, too."""
    async with running_front() as running:
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
    async with running_front() as running:
        session_id = await make_session(running)
        async with (
            screen(running, session_id) as owner,
            screen(running, session_id, f"?terminal_id={owner.ready['terminal_id']}&read_only=true") as view,
        ):
            assert (owner.ready["taken_over"], view.ready["taken_over"]) == (True, False)


async def test_what_is_typed_behind_the_end_of_a_prompt_is_refused() -> None:
    """The shell is only watched again, and whoever sat there is told before their keys are lost, though the screen has
    no room for the notice of the end."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with screen(running, session_id, "?shell=default&window=20000") as view:
            await view.talk.say("take_over")
            assert await view.hear() == {"type": "taken_over"}
            prompt = terminal(running)
            prompt.write(Stream.STDOUT, bytes(30_000))
            await view.see(20_000)
            prompt.finish()

            async def has_ended() -> bool:
                return (await running.supervisor.get_exec(session_id, prompt.exec_id)).end is not None

            await until(has_ended)
            await view.type(b"lost")
            assert await view.hear() == {"type": "given_back"}
            refusal = await view.hear()
            assert isinstance(refusal, dict)
            assert (refusal["error_code"], refusal["refused"]) == ("PERMISSION_DENIED", "input")
            assert prompt.stdin == b""


async def test_a_shell_that_is_waited_for_can_be_given_back() -> None:
    """A viewer that stops waiting has not taken the shell, and its keys typed meanwhile are refused."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with exec_talk(running, session_id) as agent, screen(running, session_id, "?shell=default") as view:
            command = await started(running, agent, mode="stateful")
            await view.see(len(COMMAND))
            await view.talk.say("take_over")
            assert await view.is_quiet()
            await view.type(b"too early")
            await view.talk.say("give_back")
            heard = [await view.hear() for _ in range(3)]
            assert [each.get("refused") for each in heard if isinstance(each, dict)].count("input") == 1
            assert {"type": "given_back"} in heard
            assert OVER in heard
            command.finish()
            await agent.hear_until("exit")
            assert await view.is_quiet()
            assert [run.stdin for run in running.tree.runs] == [b""] * len(running.tree.runs)
            await view.talk.say("take_over")
            assert await view.hear() == {"type": "taken_over"}


async def test_taking_over_and_giving_back_in_one_breath_takes_nothing() -> None:
    """The answer to the second is the only one."""
    async with running_front() as running, await running.connect() as stream:
        running.tree.scripts[""] = Script(echo=True)
        await stream.send_all(handshake(f"/v1/sessions/{await make_session(running)}/terminal/ws?shell=default"))
        await read_until(stream, b'"ready"')
        await stream.send_all(client_frame(1, b'{"type":"take_over"}') + client_frame(1, b'{"type":"give_back"}'))
        assert b'"taken_over"' not in await read_until(stream, b'"given_back"')
        assert all(run.ended.is_set() for run in running.tree.runs)


async def test_a_shell_that_cannot_be_taken_over_stays_watched() -> None:
    """The refusal names the order."""
    async with running_front() as running:
        session_id = await make_session(running)
        async with exec_talk(running, session_id) as agent, screen(running, session_id, "?shell=default") as view:
            await started(running, agent, mode="stateful")
            await view.see(len(COMMAND))
            for channel in range(2, QUEUE_LENGTH + 1):
                await agent.say("start", id=channel, cmd="wait")
            assert await is_quiet(agent)
            await view.talk.say("take_over")
            refusal = await view.hear()
            assert isinstance(refusal, dict)
            assert (refusal["error_code"], refusal["refused"]) == ("SHELL_BUSY", "take_over")
