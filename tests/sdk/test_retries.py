"""The table of repetitions: a connection that is cut at any byte costs no result and repeats no effect."""

from __future__ import annotations

import io
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import sandkasten.sync.transport
from sandkasten import errors
from sandkasten.config.values import RunsSettings
from sandkasten.model import SessionSpec, Stream
from sandkasten.sdk import SandboxClient, Session, channels, transport
from sandkasten.sdk.archives import pack
from sandkasten.sdk.files import Files
from sandkasten.sdk.terminal import Terminal
from tests.api.harness import KEY, RunningTree, running_front
from tests.fakes.runner import Script
from tests.sdk import usage
from tests.sdk.proxy import Cut, Proxy, running_proxy
from tests.sdk.twin import run
from tests.waiting import patience, until

FINER = 1
"""Times by which the cuts are closer: the campaign `test_every_byte` has a greater number."""
OUTPUT = "grüße aus dem Sandkasten\n"
HELLO = Script([(Stream.STDOUT, OUTPUT[:3].encode()), (Stream.STDOUT, OUTPUT[3:].encode())])
Use = Callable[[SandboxClient], Awaitable[None]]


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for milliseconds between attempts: the waits themselves are not what is tested here."""
    for module in (transport, sandkasten.sync.transport):
        monkeypatch.setattr(module, "FIRST_WAIT_S", 0.002)
        monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.01)


@asynccontextmanager
async def behind_proxy() -> AsyncIterator[tuple[RunningTree, Proxy, str]]:
    """Serve scripted sandboxes behind a proxy, with one session."""
    async with running_front() as running, running_proxy(running.port) as proxy:
        running.tree.scripts["hello"] = HELLO
        session = await running.supervisor.create(SessionSpec())
        yield running, proxy, session.id


def client_of(proxy: Proxy) -> SandboxClient:
    """Return a client that goes through the proxy and has reached no server yet."""
    return SandboxClient(base_url=proxy.url, api_key=KEY, timeout=patience(5))


async def cut_everywhere(proxy: Proxy, use: Use, *, step: int) -> None:
    """Use fresh clients whose first connection is cut after every `step` bytes of the request, then of the answer."""
    step = max(step // FINER, 1)
    async with client_of(proxy) as client:
        requested, answered = proxy.requested, proxy.answered
        await use(client)
    for of_request, size in ((True, proxy.requested - requested), (False, proxy.answered - answered)):
        assert size > 100
        for at in range(0, size, step):
            proxy.cuts = [Cut(at, of_request, is_reset=at // step % 2 == 1)]
            with trio.fail_after(patience(20)):
                async with client_of(proxy) as client:
                    await use(client)
    proxy.cuts = []


async def test_a_command_runs_once_wherever_its_connection_is_cut() -> None:
    """The result is whole, and PID 1 saw the command once: the repetition joins the run."""
    async with behind_proxy() as (running, proxy, session):
        uses = 0

        async def use(client: SandboxClient) -> None:
            nonlocal uses
            uses += 1
            result = await Session(client, session).exec("hello")
            assert (result.output, result.exit_code) == (OUTPUT, 0)

        await cut_everywhere(proxy, use, step=3)
        assert len(running.tree.runs) == uses > 200


@pytest.mark.parametrize("websockets", [True, False], ids=["websocket", "events"])
async def test_a_stream_goes_on_where_its_connection_was_cut(websockets: bool) -> None:
    """Each byte of the output comes once, over a WebSocket and as events, and the command runs once."""
    async with behind_proxy() as (running, proxy, session):
        proxy.refuses_websockets = not websockets
        uses = 0

        async def use(client: SandboxClient) -> None:
            nonlocal uses
            uses += 1
            chunks = [chunk async for chunk in Session(client, session).exec_stream("hello")]
            assert "".join(chunk.output for chunk in chunks) == OUTPUT
            assert chunks[-1].done

        await cut_everywhere(proxy, use, step=7)
        assert len(running.tree.runs) == uses > 60


async def test_a_create_makes_one_session_wherever_its_connection_is_cut() -> None:
    """The repetition gets the session of the lost request."""
    async with behind_proxy() as (running, proxy, _session):
        uses = 0

        async def use(client: SandboxClient) -> None:
            nonlocal uses
            uses += 1
            box = await client.create_session(labels={"a": "b"})
            live = [each.id async for each in client.sessions(label="a=b")]
            assert live == [box.id]
            await box.destroy()

        await cut_everywhere(proxy, use, step=23)
        assert len(running.tree.runners) == 1 + uses > 50


@pytest.mark.parametrize("flavour", ["asyncio", "sync"])
@pytest.mark.parametrize(
    "call", [usage.one_command, usage.one_stream, usage.one_session], ids=lambda call: call.__name__
)
async def test_the_other_clients_repeat_as_well(call: Callable[..., Any], flavour: str) -> None:
    """On asyncio and in a thread: what runs, and what is made, is there once."""
    async with behind_proxy() as (running, proxy, session):
        uses = 0

        def make(cls: Any) -> Any:  # of either client
            return cls(base_url=proxy.url, api_key=KEY, timeout=patience(5))

        async def use(_client: SandboxClient) -> None:
            nonlocal uses
            uses += 1
            await trio.to_thread.run_sync(run, flavour, call, make, session)

        await cut_everywhere(proxy, use, step=61)
        counts = len(running.tree.runs), len(running.tree.runners)
        assert counts == ((0, 1 + uses) if call is usage.one_session else (uses, 1))
        assert uses > 10


Call = Callable[[Session, Session], Awaitable[None]]
"""Use of a session through the proxy; the second object reaches the same session past the proxy."""


async def _write(box: Session, direct: Session) -> None:
    await box.write("f", OUTPUT)
    assert await direct.files.read_text("f") == OUTPUT


async def _put(box: Session, direct: Session) -> None:
    assert (await box.files.write("g", OUTPUT)).size == len(OUTPUT.encode())
    assert await direct.files.read_text("g") == OUTPUT


async def _read(box: Session, _direct: Session) -> None:
    assert (await box.read("there")).content.decode() == OUTPUT


async def _get(box: Session, _direct: Session) -> None:
    assert await box.files.read_text("there") == OUTPUT


async def _remove(box: Session, direct: Session) -> None:
    await direct.files.write("there too", OUTPUT)
    await box.files.remove("there too")
    assert not await direct.files.exists("there too")


async def _close_shell(box: Session, direct: Session) -> None:
    await direct.shell("build")
    await box.close_shell("build")
    assert [each.name for each in await direct.shells()] == ["default"]


async def _process(box: Session, direct: Session) -> None:
    before = len(await direct.processes())
    run = await box.process("server")
    assert len(await direct.processes()) == before + 1
    await direct.run(run.id).cancel()


async def _cancel(box: Session, direct: Session) -> None:
    run = await direct.process("server")
    assert (await box.run(run.id).cancel()).state == "ended"


async def _follow(box: Session, direct: Session) -> None:
    run = await direct.process("hello")
    assert (await box.run(run.id).wait_for(exit=True)).happened
    assert (await box.run(run.id).output()).text == OUTPUT


async def _info(box: Session, _direct: Session) -> None:
    assert (await box.info()).status == "running"


CALLS: Sequence[Call] = (_write, _put, _read, _get, _remove, _close_shell, _process, _cancel, _follow, _info)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.lstrip("_"))
async def test_a_call_has_its_effect_once_wherever_its_connection_is_cut(call: Call) -> None:
    """Also removing what the lost request has removed, and a process that the lost request has started."""
    async with behind_proxy() as (running, proxy, session):
        running.tree.scripts["server"] = Script(hold=trio.Event())
        async with SandboxClient(base_url=running.url, api_key=KEY) as steady:
            direct = steady.session(session)
            await direct.write("there", OUTPUT)

            async def use(client: SandboxClient) -> None:
                await call(client.session(session), direct)

            await cut_everywhere(proxy, use, step=43)


async def test_what_is_not_repeated_is_uncertain_or_done() -> None:
    """Input and signals reach the run at most once; the error says how much was acknowledged."""
    async with behind_proxy() as (running, proxy, session):
        running.tree.scripts["cat"] = Script(echo=True, ignores=frozenset({10}))
        outcomes = set()
        async with client_of(proxy) as steady:
            process = await Session(steady, session).process("cat")
            (run,) = running.tree.runs
            for of_request in (True, False):
                for at in range(0, 400, 40):
                    before = len(run.stdin), len(run.signals)
                    for order, took in (("send", 0), ("signal", 1)):
                        proxy.cuts = [Cut(at, of_request)]
                        async with client_of(proxy) as client:
                            again = Session(client, session).run(process.id)
                            try:
                                await (again.send("x") if order == "send" else again.signal("USR1"))
                            except errors.Uncertain:
                                outcomes.add((order, "uncertain"))
                            else:
                                outcomes.add((order, "done"))
                                assert len(run.stdin if took == 0 else run.signals) == before[took] + 1
                    assert len(run.stdin) <= before[0] + 1
                    assert len(run.signals) <= before[1] + 1
            proxy.cuts = []
            await process.cancel()
        assert outcomes == {(order, how) for order in ("send", "signal") for how in ("uncertain", "done")}


MEBIBYTE = random.Random(7).randbytes(1024 * 1024)


async def _pieces() -> AsyncIterator[bytes]:
    for start in range(0, len(MEBIBYTE), 16 * 1024):
        yield MEBIBYTE[start : start + 16 * 1024]


async def _write_file(files: Files, local: Path) -> None:
    with (local / "f").open("rb") as file:
        assert (await files.write("d/f", file)).size == len(MEBIBYTE)


async def _write_path(files: Files, local: Path) -> None:
    assert (await files.write("d/f", local / "f")).size == len(MEBIBYTE)


async def _unpack(files: Files, local: Path) -> None:
    assert (await files.unpack(io.BytesIO(b"".join(pack(local))), "d")).entries == 1


async def _copy_in(files: Files, local: Path) -> None:
    await files.copy_in(local, "d")


async def _copy_file_in(files: Files, local: Path) -> None:
    await files.copy_in(local / "f", "d/f")


@pytest.mark.parametrize("at", [100, 500_000, 1_000_000])
@pytest.mark.parametrize("upload", [_write_file, _write_path, _unpack, _copy_in, _copy_file_in])
async def test_an_upload_is_repeated_whole(
    upload: Callable[[Files, Path], Awaitable[None]], at: int, tmp_path: Path
) -> None:
    """A file or directory is read anew, wherever it was cut."""
    (tmp_path / "f").write_bytes(MEBIBYTE)
    async with behind_proxy() as (running, proxy, session):
        for of_request in (True, False):
            proxy.cuts = [Cut(at if of_request else 20, of_request)]
            async with client_of(proxy) as client:
                await upload(client.session(session).files, tmp_path)
        assert proxy.connections >= 4
        async with SandboxClient(base_url=running.url, api_key=KEY) as steady:
            assert await steady.session(session).files.read_bytes("d/f") == MEBIBYTE


async def test_an_upload_of_an_iterator_is_uncertain() -> None:
    """Nobody knows what arrived, if its connection is lost; what is sent anew is whole."""
    async with behind_proxy() as (_running, proxy, session), client_of(proxy) as client:
        proxy.cuts = [Cut(500_000, of_request=True)]
        with pytest.raises(errors.Uncertain):
            await client.session(session).files.write("g", _pieces())
        assert (await client.session(session).files.write("g", _pieces())).size == len(MEBIBYTE)


async def test_input_that_is_cut_says_how_much_was_taken() -> None:
    """By the parts that were acknowledged."""
    async with behind_proxy() as (running, proxy, session), client_of(proxy) as client:
        running.tree.scripts["cat"] = Script(hold=trio.Event())
        run = await client.session(session).process("cat")
        await client._transport._pool.aclose()
        proxy.cuts = [Cut(500_000, of_request=True)]  # a part has 350 kB in base64
        with pytest.raises(errors.Uncertain) as raised:
            await run.send(MEBIBYTE[:600_000])
        assert raised.value.acknowledged == len(running.tree.runs[0].stdin) == 256 * 1024


async def _type_on(viewer: Terminal) -> None:
    while True:
        await viewer.send("x")


async def test_orders_to_a_terminal_are_uncertain() -> None:
    """Of what was typed and of an order to take over nobody knows, once the connection is lost; nothing is repeated."""
    async with behind_proxy() as (running, proxy, session):
        running.tree.scripts[""] = Script(echo=True)
        async with client_of(proxy) as client, client.session(session).terminal(shell="default") as viewer:
            opened = proxy.requested
            await viewer.take_over()
        for at in (opened, opened + 5):
            proxy.cuts = [Cut(at, of_request=True)]
            async with client_of(proxy) as client, client.session(session).terminal(shell="default") as viewer:
                with pytest.raises(errors.Uncertain, match="take_over may have had its effect"):
                    await viewer.take_over()
                with trio.fail_after(patience()), pytest.raises(errors.Uncertain, match="what was typed may have"):
                    await _type_on(viewer)
        assert running.tree.runs[-1].stdin == b""


async def test_a_download_is_read_on() -> None:
    """Each byte comes once, unless somebody changes the file meanwhile: then that is said."""
    async with behind_proxy() as (_running, proxy, session):
        content = bytes(range(256)) * 4096
        async with client_of(proxy) as client:
            await Session(client, session).files.write("f", content)
        await trio.sleep(0.05)  # a file that changed just now has no version to go on with
        for offset, at in ((0, 100), (0, 700_000), (1000, 500_000)):
            async with client_of(proxy) as client:
                files = Session(client, session).files
                proxy.cuts = [Cut(at, of_request=False)]
                async with files.open("f", offset=offset) as stream:
                    assert b"".join([piece async for piece in stream]) == content[offset:]
                proxy.cuts = [Cut(at, of_request=False)]
        async with client_of(proxy) as client:
            files = Session(client, session).files
            proxy.cuts = [Cut(700_000, of_request=False)]
            async with files.open("f") as stream:
                await anext(stream)
                async with client_of(proxy) as other:
                    await Session(other, session).files.write("f", content[::-1])
                with pytest.raises(errors.ConnectionFailed):
                    async for _ in stream:
                        pass


async def test_a_session_that_takes_no_more_ids_is_used_without(caplog: pytest.LogCaptureFixture) -> None:
    """Commands and streams go on, which is said once; then they are not repeated."""
    async with (
        running_front(runs=RunsSettings(max_exec_ids=2, keep_mb=1)) as running,
        running_proxy(running.port) as proxy,
    ):
        running.tree.scripts["hello"] = HELLO
        caplog.set_level("WARNING")
        async with client_of(proxy) as client, await client.create_session() as box:
            other = await client.get_session(box.id)
            running.tree.scripts["much"] = Script([(Stream.STDOUT, bytes(700_000))])
            for _ in range(5):  # what is kept of a run does not count
                assert (await box.exec("much")).bytes_total == 700_000
            for each in (box, other, other):
                text = "".join([chunk.output async for chunk in each.exec_stream("hello")])
                assert text == OUTPUT
            proxy.refuses_websockets = True
            async with client_of(proxy) as fresh:
                third = await fresh.get_session(box.id)
                assert "".join([chunk.output async for chunk in third.exec_stream("hello")]) == OUTPUT
            said = [record.message for record in caplog.records if record.name == "sandkasten.sdk"]
            assert said == [f"/v1/sessions/{box.id} takes no more ids: its commands are not repeated from now on"] * 2
            with pytest.raises(errors.ExecIdsExhausted):
                await box.exec("hello", exec_id="mine")
            await client._transport._pool.aclose()
            proxy.cuts = [Cut(100, of_request=False)]
            with pytest.raises(errors.Uncertain):
                await box.exec("hello")
            proxy.cuts = []


async def test_a_slow_reader_holds_up_the_command_and_not_the_memory() -> None:
    """Without credit the run stops; with each piece that is taken it goes on."""
    async with behind_proxy() as (running, proxy, session):
        piece = bytes(64 * 1024)
        running.tree.scripts["much"] = Script([(Stream.STDOUT, piece)], repeat=128)
        async with client_of(proxy) as client:
            box = Session(client, session)
            async with box.start("much", raw=True) as run:
                first = await anext(run)
                (began,) = running.tree.runs
                with trio.move_on_after(0.5):
                    await began.ended.wait()
                assert not began.ended.is_set()
                assert proxy.answered < 3 * 1024 * 1024
                rest = [len(each.data) async for each in run]
                assert len(first.data) + sum(rest) == 128 * len(piece)
            assert run.end is not None


async def test_runs_share_one_websocket_and_further_ones_take_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection takes a number of runs; nobody notices when there are more."""
    monkeypatch.setattr(channels, "CHANNELS", 10)
    async with behind_proxy() as (running, proxy, session):
        release = trio.Event()
        running.tree.scripts["held"] = Script([(Stream.STDOUT, b"x")], hold=release)
        async with client_of(proxy) as client, trio.open_nursery() as nursery:
            box = Session(client, session)
            ended: list[str] = []

            async def follow() -> None:
                async with box.start(["held"]) as run:
                    ended.append("".join([str(each.data) async for each in run]))

            async def all_run() -> bool:
                return len(running.tree.runs) == 15

            for _ in range(15):
                nursery.start_soon(follow)
            await until(all_run)
            release.set()
        assert ended == ["x"] * 15
        upgrades = [line for line in proxy.requests if b"exec/ws" in line]
        assert len(upgrades) == 1
        assert len([line for line in proxy.requests if b"exec/stream" in line]) == 5
