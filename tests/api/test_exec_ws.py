"""Runs over one WebSocket: many at once, each with its own output, input and credit."""

from __future__ import annotations

import contextlib
import functools
import json
import tracemalloc

import pytest
import trio
import trio.testing

from runner.wire import protocol
from sandkasten.api.websocket import outbox
from sandkasten.api.websocket.exec import MAX_WAITING
from sandkasten.api.websocket.exec_messages import MAX_CHANNELS, STDIN_CREDIT_BYTES
from sandkasten.model import Stream
from tests.api.harness import PATIENCE_S, RunningTree, read_until, running_front
from tests.api.test_exec import has_runs
from tests.api.ws_client import (
    Chunk,
    Talk,
    client_frame,
    exec_talk,
    handshake,
    is_quiet,
    last,
    make_session,
    output_of,
    started,
)
from tests.fakes import runner
from tests.fakes.runner import Script
from tests.waiting import patience, until

KIB = 1024
PIECE = 64 * KIB


async def fill(client: Talk, channel: int) -> tuple[int, int]:
    """Feed a run that does not read until no more is granted; return the bytes that were fed and granted again."""
    fed, granted, grant = 0, 0, STDIN_CREDIT_BYTES
    while grant:
        await client.feed(channel, bytes(grant))
        fed += grant
        await trio.testing.wait_all_tasks_blocked(0.01)
        await client.say("ping", data="granted?")
        heard = [each for each in await client.hear_until("pong") if isinstance(each, dict)]
        grant = sum(each["bytes"] for each in heard if each["type"] == "credit" and each["id"] == channel)
        granted += grant
    return fed, granted


async def kept_bytes(running: RunningTree) -> int:
    """Return how much memory the output of runs takes that is kept for those who come later."""
    (spool,) = [family for family in await running.supervisor.metrics() if family.name == "sandkasten_spool_bytes"]
    return next(int(sample.value) for sample in spool.samples if sample.labels["place"] == "memory")


async def test_a_connected_client_keeps_its_session() -> None:
    """Between its commands, too: the session is not idle until the client leaves."""
    async with running_front() as running:
        session_id = await make_session(running)

        async def is_attended() -> bool:
            return await running.activities(session_id) == 1

        async def is_left() -> bool:
            return await running.activities(session_id) == 0

        async with exec_talk(running, session_id):
            await until(is_attended)
        await until(is_left)


# One run ----------------------------------------------------------------------------------------------------------


async def test_a_run_is_started_output_and_exit() -> None:
    """Output is bytes as they are, numbered over both streams; the exit has every field of an ending."""
    script = Script(
        [(Stream.STDOUT, b"a\0\xff"), (Stream.STDERR, "é\r\n".encode()), (Stream.STDOUT, b"b")], exit_code=3
    )
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["x"] = script
        heard = await client.run(7, "x", exec_id="mine")
        request = running.tree.runs[0].request
    assert heard[0] == {"type": "started", "id": 7, "seq": 0, "exec_id": "mine", "attached": False}
    assert heard[1:4] == [Chunk(7, 1, 1, b"a\0\xff"), Chunk(7, 2, 2, "é\r\n".encode()), Chunk(7, 1, 3, b"b")]
    end = last(heard)
    assert (end["id"], end["seq"], end["exec_id"], end["exit_code"], end["cause"]) == (7, 3, "mine", 3, "exited")
    assert (end["stdout_bytes"], end["stderr_bytes"], end["timed_out"]) == (4, 4, False)
    assert {"cwd", "duration_ms", "timeout_ms", "shell_restarted", "usage"} <= set(end)
    assert (request.command, request.exec_id) == ("x", "mine")


async def test_a_run_gets_an_id_if_it_has_none() -> None:
    """Every run has an id of its own."""
    async with running_front() as running, exec_talk(running) as client:
        ids = [last(await client.run(1, "x"))["exec_id"] for _ in range(2)]
    assert len(set(ids)) == 2


async def test_a_start_has_the_fields_of_post_exec() -> None:
    """A field that POST refuses is refused here, by name."""
    async with running_front() as running, exec_talk(running) as client:
        fields = {"argv": ["ls", "-l"], "cwd": "/tmp", "env": {"A": "b"}, "user": "nobody", "timeout_ms": 5}
        await client.say("start", id=1, **fields)
        await client.hear_until("exit")
        request = running.tree.runs[0].request
        assert isinstance(request, protocol.RunProgram)
        assert (request.argv, request.cwd, request.env) == (("ls", "-l"), "/tmp", {"A": "b"})
        assert (request.user, request.timeout_ms) == ("nobody", 5)
        of_a_shell = {"cmd": "x", "mode": "stateful", "user": "u"}
        for wrong in ({}, {"cmd": "x", "argv": ["x"]}, {"cmd": "x", "timeout_ms": None}, of_a_shell):
            await client.say("start", id=1, **wrong)
            error = await client.hear_text("error")
            assert (error["error_code"], error["id"], error["seq"], error["final"]) == ("INVALID_REQUEST", 1, 0, True)
            assert error["details"]
    assert len(running.tree.runs) == 1


async def test_a_wait_and_one_pipe_are_asked_of_the_session() -> None:
    """By a command behind another one of its shell."""
    async with running_front() as running, exec_talk(running) as client:
        await started(running, client, mode="stateful")
        await client.say("start", id=2, cmd="next", queue_timeout_ms=4321, streams="merged")
        await until(functools.partial(has_runs, running, 2))
        requests = [run.request for run in running.tree.runs]
    assert [(each.queue_timeout_ms, each.merged) for each in requests if isinstance(each, protocol.Exec)] == [
        (None, False),
        (4321, True),
    ]


@pytest.mark.parametrize(
    ("fields", "kind"), [({}, "exit"), ({"on_timeout": "result"}, "exit"), ({"on_timeout": "error"}, "error")]
)
async def test_a_timeout_is_an_exit_unless_asked_otherwise(fields: dict[str, str], kind: str) -> None:
    """Where a timeout is an error, the ending is in the error's details."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["slow"] = Script(cause="timed_out", exit_code=137, signal=9)
        await client.say("start", id=1, cmd="slow", **fields)
        message = last(await client.hear_until(kind, 1))
    end = message if kind == "exit" else message["details"]
    assert (end["timed_out"], end["exit_code"], end["cause"], end["signal"]) == (True, 124, "timed_out", 9)
    if kind == "error":
        assert (message["error_code"], message["final"]) == ("COMMAND_TIMEOUT", True)


@pytest.mark.parametrize(
    ("refused", "code", "is_retryable"), [("TOO_MANY", "CAPACITY", True), ("IO_ERROR", "INTERNAL_ERROR", False)]
)
async def test_what_goes_wrong_ends_its_channel_only(
    refused: protocol.ErrorCode, code: str, *, is_retryable: bool
) -> None:
    """The error says what may be known, and the number is free again."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["bad"] = Script(refusal=protocol.Error(refused, "at secret path"))
        await client.say("start", id=1, cmd="bad")
        error = await client.hear_text("error")
        assert (error["id"], error["seq"], error["final"], error["retryable"]) == (1, 0, True, is_retryable)
        assert error["error_code"] == code
        assert ("secret" in json.dumps(error)) is is_retryable
        assert last(await client.run(1, "x"))["exit_code"] == 0


async def test_a_quick_run_comes_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started, output and exit are one write, so that a client wakes up once."""
    monkeypatch.setattr(outbox, "HOLD_S", PATIENCE_S)
    async with running_front() as running, await running.connect() as stream:
        running.tree.scripts["x"] = Script([(Stream.STDOUT, b"hi"), (Stream.STDERR, b"ho")])
        await stream.send_all(handshake(f"/v1/sessions/{await make_session(running)}/exec/ws"))
        await read_until(stream, b'"hello"')
        await stream.send_all(client_frame(1, b'{"type":"start","id":1,"cmd":"x"}'))
        with trio.fail_after(patience(PATIENCE_S / 2)):
            data = await stream.receive_some(64 * KIB)
    assert [mark in data for mark in (b'"started"', b"hi", b"ho", b'"exit"')] == [True] * 4


async def test_started_does_not_wait_for_output() -> None:
    """A run that is silent is heard of."""
    async with running_front() as running, exec_talk(running) as client:
        with trio.fail_after(patience()):
            await started(running, client)
        running.tree.scripts["wait"].hold.set()  # type: ignore[union-attr]  # the event of `started`
        await client.hear_text("exit")


# Many runs --------------------------------------------------------------------------------------------------------


async def test_fifty_runs_at_once_are_kept_apart() -> None:
    """Each channel gets its own output, whole and in order."""
    async with running_front() as running, exec_talk(running) as client:
        wanted: dict[int, bytes] = {}
        for channel in range(1, 51):
            data = bytes([channel]) * 20_000
            running.tree.scripts[f"c{channel}"] = Script([(Stream.STDOUT, data), (Stream.STDERR, data)], repeat=5)
            wanted[channel] = data * 5
            await client.say("start", id=channel, cmd=f"c{channel}", mode="stateless")
        streams: dict[tuple[int, int], bytearray] = {}
        numbers: dict[int, int] = {}
        ended = 0
        while ended < 50:
            message = await client.hear()
            if isinstance(message, Chunk):
                assert message.sequence >= numbers.get(message.channel, 0)
                numbers[message.channel] = message.sequence
                streams.setdefault((message.channel, message.tag), bytearray()).extend(message.data)
            elif message["type"] == "exit":
                ended += 1
    assert {key: bytes(data) for key, data in streams.items()} == {
        (channel, tag): data for channel, data in wanted.items() for tag in (1, 2)
    }


async def test_a_busy_run_starves_nobody() -> None:
    """While one writes without end, another gets its turn, and so does a ping."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["yes"] = Script([(Stream.STDOUT, bytes(PIECE))], repeat=10**9)
        await client.say("start", id=1, cmd="yes", mode="stateless", credit=2**24, max_frame=PIECE)
        await client.hear_until("started")
        await client.say("start", id=2, cmd="x")
        between = await client.hear_until("exit", 2)
        assert len(output_of(between)) < 2**23


async def test_a_channel_without_credit_stops_its_run_alone() -> None:
    """Not a byte more than was allowed; the others go on, and new credit goes on exactly where it stopped."""
    async with running_front() as running, exec_talk(running) as client:
        data = bytes(range(256)) * 256
        running.tree.scripts["data"] = Script([(Stream.STDOUT, data)], repeat=50)
        await client.say("start", id=1, cmd="data", credit=100_000)
        first = await client.hear_until("started")
        while len(output_of(first)) < 100_000:
            first.append(await client.hear())
        assert len(output_of(first)) == 100_000
        assert last(await client.run(2, "x", mode="stateless"))["exit_code"] == 0
        assert await is_quiet(client)
        assert running.tree.runs[0].pieces_taken < 30
        await client.say("credit", id=1, bytes=16 * KIB * KIB)
        rest = await client.hear_until("exit", 1)
    assert output_of(first) + output_of(rest) == data * 50
    parts = [each for each in first + rest if isinstance(each, Chunk)]
    assert [each.sequence for each in parts if not each.more] == list(range(1, 51))


async def test_no_credit_at_all_still_tells_of_the_start() -> None:
    """A client may open the tap later."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["x"] = Script([(Stream.STDOUT, b"hi")])
        await client.say("start", id=1, cmd="x", credit=0)
        await client.hear_text("started")
        assert await is_quiet(client)
        await client.say("credit", id=1, bytes=1)
        assert await client.hear() == Chunk(1, 1, 1, b"h", more=True)
        assert await is_quiet(client)
        await client.say("credit", id=1, bytes=1)
        assert (await client.hear_until("exit", 1))[0] == Chunk(1, 1, 1, b"i")


@pytest.mark.parametrize(("fields", "sizes"), [({}, [32, 32]), ({"max_frame": 64 * KIB}, [64])])
async def test_frames_are_as_large_as_the_client_can_take(fields: dict[str, int], sizes: list[int]) -> None:
    """32 KiB unless it asks for up to 64; every part but the last says that more follows, all have one number."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["x"] = Script([(Stream.STDOUT, bytes(PIECE))])
        parts = [each for each in await client.run(1, "x", **fields) if isinstance(each, Chunk)]
    assert [len(each.data) // KIB for each in parts] == sizes
    assert [each.more for each in parts] == [True] * (len(sizes) - 1) + [False]
    assert {each.sequence for each in parts} == {1}


async def test_many_clients_that_do_not_read_cost_a_bounded_amount() -> None:
    """Less than 256 KiB each beside the output that is kept anyway, however much their runs have to say; whoever reads
    is served meanwhile.
    """
    count, start = 10, {"type": "start", "id": 1, "cmd": "yes", "credit": 2**24}
    async with running_front() as running, contextlib.AsyncExitStack() as stack:
        running.tree.scripts["yes"] = Script([(Stream.STDOUT, bytes(8 * KIB))], repeat=10**9)
        sessions = [await make_session(running) for _ in range(count)]
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for session_id in sessions:
            stream = await stack.enter_async_context(await running.connect(receive_buffer=4096))
            await stream.send_all(handshake(f"/v1/sessions/{session_id}/exec/ws"))
            await stream.send_all(client_frame(1, json.dumps(start).encode()))
        with trio.move_on_after(patience(PATIENCE_S)):
            await trio.testing.wait_all_tasks_blocked(0.05)
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, runner.__file__)])
        held_bytes = sum(trace.size for trace in snapshot.traces) - await kept_bytes(running)
        assert len(running.tree.runs) == count
        assert all(run.pieces_taken > 100 for run in running.tree.runs)
        assert held_bytes < count * 256 * KIB
        async with exec_talk(running) as client:
            assert last(await client.run(1, "x"))["exit_code"] == 0


async def test_channels_are_bounded_and_numbers_are_used_once() -> None:
    """One more is refused, and so is a number in use; neither touches what runs."""
    async with running_front() as running, exec_talk(running) as client:
        for channel in range(1, MAX_CHANNELS + 1):
            await started(running, client, channel)
        await client.say("start", id=MAX_CHANNELS, cmd="x")
        in_use = await client.hear_text("error")
        assert (in_use["error_code"], in_use["final"], in_use["refused"]) == ("CONFLICT", False, "start")
        await client.say("start", id=1000, cmd="x")
        error = await client.hear_text("error")
        assert (error["error_code"], error["id"], error["final"]) == ("CAPACITY", 1000, True)
        assert not any(run.cancelled.is_set() for run in running.tree.runs)
        assert len(running.tree.runs) == MAX_CHANNELS


# Input ------------------------------------------------------------------------------------------------------------


async def test_input_reaches_the_run_and_ends() -> None:
    """Also what is sent before `started` came."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["cat"] = Script(echo=True)
        await client.say("start", id=1, cmd="cat", stdin=True)
        await client.feed(1, b"one\0")
        await client.feed(1, b"")
        await client.feed(1, b"\xfftwo")
        await client.say("close_stdin", id=1)
        assert output_of(await client.hear_until("exit", 1)) == b"one\0\xfftwo"


async def test_input_as_text_needs_no_closing() -> None:
    """As with POST: the text, and then the end."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["cat"] = Script(echo=True)
        assert output_of(await client.run(1, "cat", stdin="hello")) == b"hello"


async def test_input_is_granted_as_the_run_reads_it() -> None:
    """Nothing is granted while it does not read and the socket to it is full; then what it took, and no more."""
    async with running_front() as running, exec_talk(running) as client:
        reads = trio.Event()
        running.tree.scripts["slow"] = Script(echo=True, reads=reads)
        await client.say("start", id=1, cmd="slow", stdin=True, credit=0)
        await client.hear_text("started")
        fed, granted = await fill(client, 1)
        assert granted < fed
        reads.set()
        while granted < fed:
            granted += (await client.hear_text("credit"))["bytes"]
        assert await is_quiet(client)
        assert granted == fed == len(running.tree.runs[0].stdin)


async def test_more_input_than_was_granted_ends_the_channel() -> None:
    """The run is treated as when its client leaves; the connection goes on."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["slow"] = Script(echo=True, reads=trio.Event())
        await client.say("start", id=1, cmd="slow", stdin=True, on_disconnect="cancel")
        await client.hear_text("started")
        await fill(client, 1)
        await client.feed(1, b"x")
        error = await client.hear_text("error")
        assert (error["error_code"], error["id"], error["final"]) == ("INVALID_REQUEST", 1, True)
        with trio.fail_after(patience()):
            await running.tree.runs[0].cancelled.wait()
        assert last(await client.run(1, "x"))["exit_code"] == 0


async def test_input_to_a_run_that_takes_none_is_refused_once() -> None:
    """The run goes on."""
    async with running_front() as running, exec_talk(running) as client:
        run = await started(running, client)
        for _ in range(3):
            await client.feed(1, b"x")
        error = await client.hear_text("error")
        assert (error["final"], error["refused"]) == (False, "stdin")
        assert await is_quiet(client)
        run.finish()
        await client.hear_text("exit")


async def test_input_of_a_channel_goes_with_it() -> None:
    """Input that a run did not read is dropped: no task waits with it, and the next run on that number is granted
    nothing.
    """
    async with running_front() as running, exec_talk(running) as client:
        reads = trio.Event()
        running.tree.scripts["deaf"] = Script(echo=True, reads=reads)
        await client.say("start", id=1, cmd="deaf", stdin=True, exec_id="deaf", credit=0)
        await client.hear_text("started")
        counts = []
        for _ in range(20):
            await client.say("attach", id=2, exec_id="deaf", credit=0)
            await client.hear_text("started")
            await fill(client, 2)
            await client.say("detach", id=2)
            await client.hear_text("detached")
            counts.append(trio.lowlevel.current_statistics().tasks_living)
        assert max(counts) <= counts[0] + MAX_WAITING
        await started(running, client, 2, stdin=True)
        reads.set()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert await is_quiet(client)


async def test_input_after_its_end_is_refused() -> None:
    """Bytes behind `close_stdin` would be lost in silence."""
    async with running_front() as running, exec_talk(running) as client:
        running.tree.scripts["hold"] = Script(hold=trio.Event())
        await client.say("start", id=1, cmd="hold", stdin=True)
        await client.hear_text("started")
        await client.feed(1, b"a")
        await client.say("close_stdin", id=1)
        await client.feed(1, b"b")
        assert (await client.hear_text("error"))["refused"] == "stdin"
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert running.tree.runs[0].stdin == b"a"
