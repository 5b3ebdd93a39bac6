"""Uses of the client against a running server, one function each; the blocking client runs them with other tokens."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
from pathlib import Path

import pytest

from sandkasten import errors
from sandkasten.sdk import SandboxClient


async def commands(client: SandboxClient) -> None:
    """Commands keep the shell's state, and their results say how they ended."""
    async with await client.create_session(labels={"job": "7"}, env={"WHO": "world"}) as box:
        result = await box.exec("cd /tmp; echo hello $WHO; echo err >&2; exit 3")
        assert (result.exit_code, result.output, result.cwd) == (3, "hello world\nerr\n", "/tmp"), result
        with pytest.raises(errors.CommandFailed, match="exit code 3") as failed:
            result.check()
        assert failed.value.result is result
        both = (await box.exec("pwd; echo err >&2", separate=True)).check()
        assert (both.stdout, both.stderr) == ("/tmp\n", "err\n")
        assert (await box.exec_bytes(["printf", "\\377\\0"])).stdout == b"\xff\0"
        assert (await box.exec("cat", stdin="grüße")).output == "grüße"
        assert (await box.exec("echo $A$PWD", env={"A": "1"}, cwd="/usr", stateless=True)).output == "1/usr\n"
        with pytest.raises(errors.CommandTimeout) as late:
            await box.exec("echo begun; sleep 60", timeout_ms=300)
        assert late.value.details["output"] == "begun\n"
        timed_out = await box.exec("sleep 60", timeout_ms=100, on_timeout="result")
        assert (timed_out.timed_out, timed_out.exit_code, timed_out.ok) == (True, 124, False)
        assert (await box.exec("date +%N", exec_id="same")).output == (
            await box.exec("date +%N", exec_id="same")
        ).output
        with pytest.raises(errors.Conflict):
            await box.exec("date", exec_id="same")
        await box.shell("build", cwd="/usr")
        assert (await box.exec("pwd", shell="build")).output == "/usr\n"
        assert [each.name for each in await box.shells()] == ["default", "build"]
        await box.close_shell("build")
        assert [each.id async for each in client.sessions(label="job=7")] == [box.id]
    assert (await box.info()).status == "destroyed"
    with pytest.raises(errors.SessionExpired) as gone:
        await box.exec("true")
    assert isinstance(gone.value, errors.SandkastenAPIError)
    assert (gone.value.status_code, gone.value.details["end_reason"]) == (410, "user")


async def runs_that_are_left(client: SandboxClient) -> None:
    """Endless output that nobody takes any more holds up neither its own end nor another run on the connection."""
    async with (
        await client.create_session() as box,
        box.start("echo here; cat", stdin=True, stateless=True) as other,
    ):
        assert (await anext(other)).data == "here\n"
        for is_cancelled in (True, False):
            async with box.start("yes", stateless=True, raw=True) as run:
                assert len((await anext(run)).data) > 0
                if not is_cancelled:
                    run.detach()
            assert (await run.info()).state == ("ended" if is_cancelled else "running")
            await other.send("more\n")
            assert (await anext(other)).data == "more\n"
        await run.cancel(now=True)


async def streams(client: SandboxClient) -> None:
    """Output comes as it is written, as text without half characters, from any number of runs at once."""
    async with await client.create_session() as box:
        chunks = [chunk async for chunk in box.exec_stream("printf 'gr\\303'; sleep 0.2; printf '\\274n'; exit 3")]
        assert [chunk.output for chunk in chunks] == ["gr", "ün", ""]
        assert (chunks[-1].done, chunks[-1].exit_code, chunks[-1].cwd) == (True, 3, "/workspace")
        cleaned = [chunk.output async for chunk in box.exec_stream("printf '\\033[31mred\\033[0m\\r\\n'")]
        assert "".join(cleaned) == "red\n"
        raw = [chunk.output async for chunk in box.exec_stream("printf '\\033[31mred\\r\\n'", raw_output=True)]
        assert "".join(raw) == "\x1b[31mred\r\n"
        with pytest.raises(errors.SandkastenStreamError) as late:
            async for _ in box.exec_stream("sleep 60", timeout_ms=100):
                pass
        assert isinstance(late.value, errors.CommandTimeout)
        big = [chunk.output async for chunk in box.exec_stream("seq 1 300000")]
        assert "".join(big) == "".join(f"{number}\n" for number in range(1, 300001))
        async with box.start("cat; echo done >&2", stdin=True) as run:
            await run.send("one\n")
            first = await anext(run)
            assert (first.stream, first.data) == ("stdout", "one\n")
            await run.close_input()
            assert [(each.stream, each.data) async for each in run] == [("stderr", "done\n")]
            assert (await run.wait()).ok
        async with (
            box.start("echo a; sleep 0.1; echo b", stateless=True, raw=True) as one,
            box.start("echo c; sleep 0.1; echo d", stateless=True) as two,
        ):
            assert b"".join([bytes(each.data) async for each in one]) == b"a\nb\n"  # type: ignore[arg-type]  # raw
            assert "".join([str(each.data) async for each in two]) == "c\nd\n"


async def runs(client: SandboxClient) -> None:
    """Runs are found again, waited for, signalled and cancelled; a block that is left cancels its run."""
    async with await client.create_session() as box:
        server = await box.process("exec python3 -m http.server 5173", process_id="web")
        assert (await server.wait_for(port=5173)).happened
        assert 5173 in [each.port for each in await box.ports()]
        assert [each.process_id for each in await box.processes()] == ["web"]
        ended = await box.run("web").cancel()
        assert ended.end is not None
        assert ended.end.cause == "cancelled"
        async with box.start("echo ready on 1; sleep 60") as run:
            waited = await run.wait_for(pattern=r"ready on \d")
            assert (waited.happened, waited.line) == (True, "ready on 1")
            await run.signal("INT")
            assert (await run.wait()).cause == "signalled"
        async with box.start("echo begun; sleep 60") as run:
            assert (await anext(run)).data == "begun\n"
        assert (await box.run(run.id).info()).state == "ended"
        async with box.start("echo begun; sleep 0.3; echo ended", detach=True) as run:
            assert (await anext(run)).data == "begun\n"
        again = box.run(run.id)
        assert "".join([str(each.data) async for each in again]) == "begun\nended\n"
        assert (await run.output(offset=6)).text == "ended\n"
        assert await run.kept_output() == await run.kept_output("stdout", max_bytes=100) == b"begun\nended\n"
        assert await run.kept_output(max_bytes=7) == b"begun\ne"
        much = await box.exec_bytes("head -c 9000000 /dev/zero; echo err >&2", stateless=True)
        assert (much.truncated, len(await box.run(much.exec_id).kept_output("stdout"))) == (True, 9_000_000)
        assert [str(each.data) async for each in run] == ["ended\n"]  # behind what this object has read
        assert run.id in [each.exec_id for each in await box.runs(kind="command")]
        async with box.start("echo begun; exec cat", tty=(80, 24), stateless=True) as run:
            assert (await anext(run)).data == "begun\r\n"
            await run.resize(100, 30)
            assert (await run.info()).tty == {"cols": 100, "rows": 30}


async def files(client: SandboxClient, directory: Path) -> None:
    """Files of any content and size, directories both ways, changes and edits."""
    async with await client.create_session() as box:
        await box.write("a.txt", "hällo\n")
        assert (await box.read("a.txt")).content == "hällo\n".encode()
        assert (await box.read("a.txt", max_bytes=2)).truncated
        data = os.urandom(3_000_000)
        moved: list[tuple[int, int | None]] = []
        written = await box.files.write(
            "d/data", io.BytesIO(data), mode=0o600, progress=lambda *each: moved.append(each)
        )
        assert (written.path, written.size, moved[-1]) == ("/workspace/d/data", len(data), (len(data), len(data)))
        assert await box.files.read_bytes("d/data") == data
        assert await box.files.read_bytes("d/data", offset=10, length=5) == data[10:15]
        info = await box.files.stat("d/data")
        assert (info.size, info.mode) == (len(data), "0600")
        assert info.etag.removeprefix("W/") == written.etag.removeprefix("W/")
        assert info.sha256 is None
        assert (await box.files.stat("d/data", sha256=True)).sha256 == hashlib.sha256(data).hexdigest()
        with pytest.raises(errors.PreconditionFailed):
            await box.files.write("a.txt", b"", new=True)
        with pytest.raises(errors.FileNotFound):
            await box.files.read_bytes("missing")
        local = directory / "local"
        (local / "sub").mkdir(parents=True)
        (local / "sub/one").write_bytes(data)
        (local / "two").write_text("two")
        (local / "link").symlink_to("two")
        assert await box.upload(local / "two", dest_path="/workspace/up") == ["/workspace/up/two"]
        assert await box.files.read_text("up/two") == "two"
        await box.files.copy_in(local, "in")
        assert (await box.files.stat("in/link")).target == "two"
        assert sorted(each.path for each in await box.files.list("in", depth=3)) == [
            *("/workspace/in/link", "/workspace/in/sub", "/workspace/in/sub/one", "/workspace/in/two")
        ]
        await box.files.copy_out("in", directory / "out", progress=lambda *each: moved.append(each))
        assert (directory / "out/sub/one").read_bytes() == data
        assert (directory / "out/link").readlink() == Path("two")
        assert moved[-1][0] > len(data)
        await box.files.copy_out("in/two", directory / "single")
        assert (directory / "single").read_text() == "two"
        await box.files.copy_in(local / "two", "copy")
        async with box.files.archive("in") as archive:
            packed = b"".join([piece async for piece in archive])
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            assert "two" in [name.removeprefix("./") for name in tar.getnames()]
        assert (await box.files.unpack(packed, "again")).entries == 4
        await box.files.move("again/two", "again/three")
        await box.files.copy("again/three", "again/four")
        await box.files.mkdir("again/five/six")
        await box.files.chmod("again/four", 0o755)
        assert [each.name for each in await box.files.list("again")] == ["five", "four", "link", "sub", "three"]
        await box.files.remove("again", recursive=True)
        assert not await box.files.exists("again")
        assert [each.line for each in (await box.files.search("häl", glob="*.txt")).found] == [1]
        assert await box.files.glob("**/data") == ["/workspace/d/data"]
        assert "hällo" in (await box.files.view("a.txt")).text
        (edit,) = await box.files.edit([{"path": "a.txt", "op": "replace", "old": "h", "new": "H"}])
        assert edit.replacements == 1
        with pytest.raises(errors.Conflict):
            await box.files.edit([{"path": "a.txt", "op": "replace", "old": "none", "new": "H"}])
        async with box.files.watch("d") as changes:
            async for change in changes:
                if change.type == "ready":
                    await box.write("d/new", "x")
                if change.path == "/workspace/d/new":
                    break


async def large_files(client: SandboxClient, directory: Path) -> None:
    """A file and a directory of 96 MiB each, in and out, take less than 32 MiB of this process's memory."""
    size = 96 * 1024 * 1024
    (directory / "in").mkdir()
    with (directory / "in/large").open("wb") as file:
        file.truncate(size)
    async with await client.create_session() as box:
        await box.write("small", "x")
        began = _most_memory()
        assert (await box.files.write("large", directory / "in/large")).size == size
        async with box.files.open("large") as stream:
            assert sum([len(piece) async for piece in stream]) == size
        await box.files.remove("large")
        await box.files.copy_in(directory / "in", "d")
        assert (await box.files.copy_out("d", directory / "out")).size_bytes == size
        took = _most_memory() - began
        assert took < 32 * 1024 * 1024, took


def _most_memory() -> int:
    """Return the most bytes of memory that this process has had: proc_pid_status(5)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


async def terminals(client: SandboxClient) -> None:
    """A terminal is typed into, and a person sits down at the agent's shell."""
    async with await client.create_session() as box:
        async with box.terminal(cols=100) as terminal:
            assert (terminal.cols, terminal.rows) == (100, 24)
            await terminal.resize(90, 30)
            await terminal.send("stty size; exit\n")
            seen = b"".join([data async for data in terminal])
            assert b"30 90" in seen
            assert terminal.end is not None
        await box.exec("export WHO=agent")
        async with box.terminal(shell="default") as terminal:
            await terminal.take_over()
            assert terminal.taken_over
            await terminal.send("echo it is $WHO\n")
            seen = b""
            while b"it is agent" not in seen:
                seen += await anext(terminal)
            await terminal.give_back()
            assert not terminal.taken_over
        assert (await box.exec("echo $WHO")).output == "agent\n"
        with pytest.raises(errors.ShellNotFound):
            async with box.terminal(shell="none"):
                pass


async def the_rest(client: SandboxClient) -> None:
    """Sessions, workspaces, events and the node."""
    async with client.events(types=["session.created", "session.paused"]) as events:
        box = await client.create_session(workspace_id="notes", idle_timeout_seconds=600)
        created = await anext(events)
        assert (created.type, created.session_id) == ("session.created", box.id)
        again = await client.get_session(box.id)
        assert (await again.info()).workspace_id == "notes"
        assert (await box.update(idle_timeout_seconds=None, labels={"a": "b"})).expires_at is None
        assert (await box.pause()).status == "paused"
        assert (await anext(events)).type == "session.paused"
        assert (await box.resume()).status == "running"
        assert (await box.stats()).memory_bytes > 0
        changed = await box.update(network={"mode": "none", "log": "denied"}, if_revision=1)
        with pytest.raises(errors.Conflict):
            await box.update(network="none", if_revision=1)
        network = await box.network()
        assert (network.mode, network.log, network.revision) == ("none", "denied", changed.network["revision"])
        assert (await box.egress_log(verdict="denied", limit=5)).entries == []
        with pytest.raises(errors.ClientError):  # the mode none takes no rules
            await box.add_rules(allow=["a.example"])
        assert (await box.add_rules()).network == {**changed.network, "revision": network.revision + 1}
        assert await box.previews() == []
        with pytest.raises(errors.PreviewsOff):
            await box.preview(8000, ttl_seconds=60, access="public")
        with pytest.raises(errors.PreviewNotFound):
            await box.close_preview(8000)
    async with box.watch_events(cursor="0") as events:
        assert (await anext(events)).type == "session.created"
        assert events.cursor
    assert box.id in [each.id for each in await client.list_sessions()]
    assert [each.id for each in await client.list_workspaces()] == ["notes"]
    with pytest.raises(errors.WorkspaceBusy):
        await client.delete_workspace("notes")
    await box.destroy()
    await box.destroy()
    notes = client.workspace("notes")
    await notes.files.write("today", "hello")
    async with notes.export() as archive:
        packed = b"".join([piece async for piece in archive])
    assert (await client.workspace("copy").import_archive(packed)).entries == 1
    assert await client.workspace("copy").files.read_text("today") == "hello"
    assert (await notes.info(usage=True)).usage is not None
    await notes.delete()
    await client.workspace("copy").delete()
    with pytest.raises(errors.WorkspaceNotFound):
        await notes.info()
    node = await client.node()
    assert (await client.drain()).status == "draining"
    assert (await client.undrain()).status == node.status
    assert [each.name for each in await client.images()] == node.images
    assert [each.name for each in await client.list_images()] == node.images
    assert await client.list_images(label=["none", "team=a"]) == []
    image = await client.get_image("python")
    assert (image.name, image.problems, "python" in image.alias_names) == ("host", [], True)
    with pytest.raises(errors.InvalidImage):
        await client.delete_image("none:x")
    assert (await client.prune_images(older_than_s=0, dry_run=True)).freed_bytes == 0
    assert (await client.system()).version
    assert [each["id"] for each in await client.keys()] == ["configured"]
    assert await client.pools() == []
    assert await client.healthz()
    with pytest.raises(errors.SessionNotFound):
        await client.get_session("0123456789abcdef")


async def one_command(client: SandboxClient, session: str) -> None:
    """A command of the tests of repetitions."""
    assert (await client.session(session).exec("hello")).output.endswith("Sandkasten\n")


async def one_stream(client: SandboxClient, session: str) -> None:
    """The same command, with its output as it comes."""
    text = "".join([chunk.output async for chunk in client.session(session).exec_stream("hello")])
    assert text.endswith("Sandkasten\n")
    assert text.count("Sandkasten") == 1


async def one_session(client: SandboxClient, _session: str) -> None:
    """A session that is made and ended."""
    async with await client.create_session() as made:
        assert made.id


USES = (commands, runs_that_are_left, streams, runs, terminals, the_rest)


async def a_restart(client: SandboxClient, begun: threading.Event) -> None:
    """A stream, events, a waiting command and a process go on while the daemon is killed and another starts."""
    box = await client.create_session()
    events = box.watch_events(cursor="0")
    assert (await anext(events)).type == "session.created"
    process = await box.process("for n in $(seq 100); do echo $n; sleep 0.05; done")
    seen: list[str] = []
    async for chunk in box.exec_stream("for n in $(seq 100); do echo $n; sleep 0.05; done"):
        seen.append(chunk.output)
        if len(seen) == 5:
            begun.set()
    numbers = "".join(f"{number}\n" for number in range(1, 101))
    assert "".join(seen) == numbers, seen
    assert chunk.done
    assert "".join([str(each.data) async for each in process]) == numbers
    await box.destroy()
    happened = [await anext(events)]
    while happened[-1].type != "session.destroyed":
        happened.append(await anext(events))
    await events.aclose()
    assert [each.cursor for each in happened] == sorted({each.cursor for each in happened})
    assert {each.type for each in happened} >= {"process.started", "process.exited", "exec.ended"}


async def a_restart_during_a_command(client: SandboxClient, begun: threading.Event) -> None:
    """The answer to a command comes from the next daemon."""
    box = await client.create_session()
    begun.set()
    assert (await box.exec("echo begun; sleep 4; echo ended")).output == "begun\nended\n"
    await box.destroy()
