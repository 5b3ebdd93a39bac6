"""Terminals on the real kernel: shells of their own, several viewers, and the agent's own shell watched and taken."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.errors import ExecEnded, InvalidRequest, PermissionDenied, ShellNotFound, TerminalNotFound
from sandkasten.model import ExecSpec, SessionSpec, TerminalSize, TerminalSpec
from sandkasten.supervisor import TerminalViewer
from tests.waiting import patience, until

CAT = b"sh -c 'echo be\"\"gun; exec cat'"
"""Says when it is in the foreground: a key that comes before is for nobody, and one that is pressed again since nothing
came of it yet may reach the next prompt, and drop what was typed there."""

CTRL_C, CTRL_D, CTRL_Z = b"\x03", b"\x04", b"\x1a"


@pytest.fixture
async def session_id(supervisor: LocalSupervisor) -> str:
    return (await supervisor.create(SessionSpec())).id


class Screen:
    """Text that a viewer has received and that was not yet looked for."""

    def __init__(self, viewer: TerminalViewer) -> None:
        self._pieces = aiter(viewer)
        self.text = b""

    async def until(self, wanted: bytes) -> bytes:
        """Read until `wanted` is on the screen; return what came up to it, and forget that."""
        with trio.fail_after(patience(15)):
            while wanted not in self.text:
                self.text += await anext(self._pieces)
        seen, _, self.text = self.text.partition(wanted)
        return seen + wanted


async def test_a_terminal_has_job_control(supervisor: LocalSupervisor, session_id: str) -> None:
    """Ctrl-C ends a job, Ctrl-Z stops one and `fg` goes on with it, and the size is the viewer's."""
    async with supervisor.open_terminal(session_id, TerminalSpec(TerminalSize(90, 20))) as viewer:
        screen = Screen(viewer)
        await viewer.send(b"stty size; " + CAT + b"\r")
        await screen.until(b"20 90")
        await screen.until(b"begun")
        await viewer.send(CTRL_C)
        await screen.until(b"$ ")
        await viewer.send(b"echo status=$?\r")
        await screen.until(b"status=130")
        await screen.until(b"$ ")
        await viewer.send(CAT + b"\r")
        await screen.until(b"begun")
        await viewer.send(CTRL_Z)
        await screen.until(b"Stopped")
        await screen.until(b"$ ")
        await viewer.send(b"jobs; fg\r")
        await screen.until(b"Stopped                 " + CAT + b"\r\n" + CAT + b"\r\n")
        await viewer.send(CTRL_D)
        await screen.until(b"$ ")
        await viewer.resize(TerminalSize(100, 30))
        await viewer.send(b"stty size\r")
        await screen.until(b"30 100")
        await screen.until(b"$ ")  # before the prompt is there, the key means nothing to bash
        await viewer.send(CTRL_D)
        with trio.fail_after(patience(15)):
            assert (await viewer.wait_end()).exit_code == 0
        with pytest.raises(ExecEnded):
            await viewer.send(b"x")


async def test_a_later_viewer_sees_the_past(supervisor: LocalSupervisor, session_id: str) -> None:
    """A later viewer sees the same as the first; the terminal lives without any viewer; a read-only viewer
    can't type.
    """
    async with supervisor.open_terminal(session_id, TerminalSpec()) as first:
        await first.send(b"X=mark; echo $X-one\r")
        await Screen(first).until(b"mark-one")
        terminal_id = first.terminal_id
    async with supervisor.open_terminal(session_id, TerminalSpec(terminal_id=terminal_id)) as second:
        screen = Screen(second)
        await screen.until(b"mark-one")
        watching = TerminalSpec(terminal_id=terminal_id, read_only=True)
        async with supervisor.open_terminal(session_id, watching) as third:
            await second.send(b"echo $X-two\r")
            await screen.until(b"mark-two")
            await Screen(third).until(b"mark-two")
            with pytest.raises(PermissionDenied):
                await third.send(b"rm -rf /\r")
            with pytest.raises(PermissionDenied):
                await third.resize(TerminalSize())
        await second.send(b"exit\r")
        await second.wait_end()
        assert second.is_taken_over  # an end is told as such, not as hands that changed
    with pytest.raises(TerminalNotFound):
        async with supervisor.open_terminal(session_id, TerminalSpec(terminal_id=terminal_id)):
            pass


async def test_a_viewer_that_does_not_read_holds_up_nobody(supervisor: LocalSupervisor, session_id: str) -> None:
    """Megabytes pass; the other viewer sees the end, and the slow one misses the middle and knows it."""
    async with supervisor.open_terminal(session_id, TerminalSpec()) as fast:
        joining = TerminalSpec(terminal_id=fast.terminal_id)
        async with supervisor.open_terminal(session_id, joining) as slow:
            await fast.send(b"head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the''end\r")
            await Screen(fast).until(b"theend")
            await anext(aiter(slow))
            assert slow.skipped_bytes > 1_000_000


async def test_the_agent_s_shell_can_be_watched(supervisor: LocalSupervisor, session_id: str) -> None:
    """A viewer of a shell sees its commands, their output and failing exit codes; the results stay exact."""
    async with supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as viewer:
        screen = Screen(viewer)
        with pytest.raises(PermissionDenied):
            await viewer.send(b"not mine\r")
        result = await supervisor.exec(session_id, ExecSpec("echo one; echo two >&2; exit 3"))
        assert (result.stdout, result.stderr, result.end.exit_code) == (b"one\n", b"two\n", 3)
        seen = await screen.until(b"exited: 3")
        assert b"$ echo one; echo two >&2; exit 3" in seen
        assert b"one\r\n" in seen
        assert b"two\r\n" in seen


@pytest.mark.parametrize("read_only", [False, True])
async def test_who_comes_to_watch_sees_what_was_there(
    supervisor: LocalSupervisor, session_id: str, read_only: bool
) -> None:
    """Earlier commands, how they ended, what the running one has written, and then what it writes: once each, in
    order, as often as somebody comes."""
    await supervisor.exec(session_id, ExecSpec("echo first; exit 3"))
    await supervisor.exec(session_id, ExecSpec("echo elsewhere", stateless=True))
    spec = ExecSpec("printf 'one\\nhalf a '; read -r x; echo line $x", stdin_open=True)
    async with supervisor.open_exec(session_id, spec) as running:
        assert (await anext(aiter(running))).data == b"one\nhalf a "
        watching = TerminalSpec(shell="default", read_only=read_only)
        for _ in range(2):
            async with supervisor.open_terminal(session_id, watching) as viewer:
                seen = await Screen(viewer).until(b"\r\nhalf a ")
                assert b"elsewhere" not in seen
                parts = [b"$ echo first; exit 3", b"\r\nfirst\r\n", b"[exited: 3]", b"$ printf", b"\r\none\r\n"]
                places = [seen.find(part) for part in parts]
                assert -1 not in places
                assert places == sorted(places)
                assert [seen.count(part) for part in parts] == [1] * len(parts)
        async with supervisor.open_terminal(session_id, watching) as viewer:
            screen = Screen(viewer)
            await running.send_stdin(b"two\n")
            assert (await screen.until(b"line two\r\n")).endswith(b"\r\nhalf a line two\r\n")
            await supervisor.exec(session_id, ExecSpec("echo third"))
            assert (await screen.until(b"third\r\n")).startswith(b"\x1b[2m$ echo third")


async def test_a_long_past_is_cut_at_a_line(supervisor: LocalSupervisor, session_id: str) -> None:
    """The newest quarter of a megabyte, and nothing older."""
    await supervisor.exec(session_id, ExecSpec("echo too old"))
    await supervisor.exec(session_id, ExecSpec("seq -f 'line %07g' 40000"))
    async with supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as viewer:
        seen = await Screen(viewer).until(b"line 0040000\r\n")
        assert 200_000 < len(seen) < 320_000
        assert b"too old" not in seen
        assert set(map(len, seen.splitlines()[1:])) == {len("line 0000001")}


async def test_the_past_of_a_shell_outlives_its_daemon(config: Config) -> None:
    """A viewer of the shell sees runs from before the daemon's restart, as far as the next daemon has them."""
    async with open_supervisor(attrs.evolve(config, sessions_on_stop="keep")) as supervisor:
        session = await supervisor.create(SessionSpec())
        await supervisor.exec(session.id, ExecSpec("echo before"))
    async with (
        open_supervisor(config) as supervisor,
        supervisor.open_terminal(session.id, TerminalSpec(shell="default")) as viewer,
    ):
        assert b"$ echo before" in await Screen(viewer).until(b"\r\nbefore\r\n")


async def test_the_agent_s_shell_can_be_taken_over(supervisor: LocalSupervisor, session_id: str) -> None:
    """State that a person sets in the shell is there for the agent's commands, which wait meanwhile and stay exact."""
    await supervisor.exec(session_id, ExecSpec("mine=agent; f() { echo from-f; }"))
    async with (
        trio.open_nursery() as nursery,
        supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as viewer,
    ):
        screen = Screen(viewer)
        await viewer.take_over()
        assert viewer.is_taken_over
        await viewer.send(b"cd /tmp; echo $mine-too; f; theirs=person\r")
        await screen.until(b"agent-too")
        await screen.until(b"from-f")
        results = []

        async def run() -> None:
            results.append(await supervisor.exec(session_id, ExecSpec("pwd; echo $theirs; (: </dev/tty) 2>&1")))

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert results == []
        await viewer.give_back()
    assert results[0].output.startswith(b"/tmp\nperson\n")
    assert b"/dev/tty" in results[0].output  # the command has no terminal
    assert not results[0].end.shell_restarted


async def test_a_taken_shell_is_given_back_when_its_taker_leaves(supervisor: LocalSupervisor, session_id: str) -> None:
    """A shell that was taken over is given back when the viewer leaves, also in the middle of a command."""
    async with supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as viewer:
        await viewer.take_over()
        await viewer.send(b"kept=yes; echo as''leep; sleep 1000\r")
        await Screen(viewer).until(b"asleep")  # not the echo of what was typed
    with trio.fail_after(patience(10)):
        assert (await supervisor.exec(session_id, ExecSpec("echo $kept"))).output == b"yes\n"


async def test_a_prompt_that_nobody_waits_for_any_more_never_comes(
    supervisor: LocalSupervisor, session_id: str
) -> None:
    """A viewer that gives up its wait for the shell leaves the shell's queue at once."""
    async with supervisor.open_exec(session_id, ExecSpec("echo up; read -r x", stdin_open=True)) as running:
        assert (await anext(aiter(running))).data == b"up\n"
        async with supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as viewer:
            with trio.move_on_after(0.1) as scope:
                await viewer.take_over()
            assert scope.cancelled_caught
            assert not viewer.is_taken_over

            async def is_out_of_the_queue() -> bool:
                return not (await supervisor.shells(session_id))[0].queued

            await until(is_out_of_the_queue)
            await running.send_stdin(b"on\n")
            assert (await running.wait_end()).exit_code == 0
            assert (await supervisor.exec(session_id, ExecSpec("echo $x"))).output == b"on\n"
            await viewer.take_over()
            assert viewer.is_taken_over


async def test_each_viewer_sits_at_the_prompt_it_took(supervisor: LocalSupervisor, session_id: str) -> None:
    """Two viewers may share one prompt; `exit` ends it for both, and the next prompt belongs to the viewer that takes
    it.
    """
    async with (
        supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as first,
        supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as second,
    ):
        screen = Screen(first)
        await first.take_over()
        assert (first.is_taken_over, second.is_taken_over) == (True, False)
        with pytest.raises(PermissionDenied):
            await second.send(b"x")
        await second.take_over()
        assert second.is_taken_over
        await first.give_back()
        assert (first.is_taken_over, second.is_taken_over) == (False, True)
        await first.take_over()
        await second.send(b"exit\r")
        await screen.until(b"[given back]")
        assert (first.is_taken_over, second.is_taken_over) == (False, False)
        for viewer in (first, second):
            with pytest.raises(PermissionDenied):
                await viewer.send(b"lost\r")
        await second.take_over()
        assert (first.is_taken_over, second.is_taken_over) == (False, True)
        await first.give_back()
        assert second.is_taken_over
        await second.send(b"echo it''works\r")
        await screen.until(b"itworks")


async def test_unknown_shells_and_terminals_are_refused(supervisor: LocalSupervisor, session_id: str) -> None:
    """A viewer of an unknown shell or terminal is refused, each with an error of its own type."""
    with pytest.raises(ShellNotFound):
        async with supervisor.open_terminal(session_id, TerminalSpec(shell="nobody")):
            pass
    with pytest.raises(TerminalNotFound):
        async with supervisor.open_terminal(session_id, TerminalSpec(terminal_id="nothing")):
            pass


@pytest.mark.parametrize(
    "spec", [TerminalSpec(cwd="/nowhere"), TerminalSpec(cwd="/etc/passwd"), TerminalSpec(user="no")]
)
async def test_a_terminal_that_can_not_start_was_never_open(
    supervisor: LocalSupervisor, session_id: str, spec: TerminalSpec
) -> None:
    """A terminal that can't start is refused before its viewer gets anything else, and leaves no run."""
    with pytest.raises(InvalidRequest):
        async with supervisor.open_terminal(session_id, spec):
            pytest.fail("there is no such terminal")
    assert await supervisor.execs(session_id) == []


async def test_the_end_of_a_session_ends_every_view(supervisor: LocalSupervisor, session_id: str) -> None:
    """The end of a session ends the view of a watched shell, and that of a terminal of its own."""
    async with (
        supervisor.open_terminal(session_id, TerminalSpec(shell="default")) as view,
        supervisor.open_terminal(session_id, TerminalSpec()) as own,
    ):
        await anext(aiter(own))
        await supervisor.destroy(session_id)
        with trio.fail_after(patience(10)):
            for viewer in (view, own):
                async for _ in viewer:
                    pass
                await viewer.wait_end()
