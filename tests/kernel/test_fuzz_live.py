"""Fuzzed peers of the real parts: a daemon that lies to nsinit, a runner that lies to the daemon, archives that lie.

The seed is part of each assertion's message: `random.Random(seed)` makes the same input again.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import select
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from nsinit.wire.protocol import (
    MAX_DATAGRAM_BYTES,
    REQUESTS,
    Build,
    DeleteImage,
    MakeWorkspace,
    Prepare,
    ProtocolError,
    Scan,
    Scanned,
    Start,
)
from nsinit.wire.validate import InvalidName, check_limits, check_plan, check_session_id, check_workspace_id
from runner.wire.protocol import FROM_DAEMON, MAX_REQUEST_BYTES, FrameDecoder, Kind, encode_frame
from runner.wire.protocol import REQUESTS as RUNNER_REQUESTS
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.errors import InvalidImage, RunnerProtocolError, SandkastenError
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.model import ExecSpec, SessionSpec, Status
from tests.fuzz import grammar
from tests.fuzz.grammar import Choices
from tests.fuzz.targets import ANSWERS as RUNNER_ANSWERS
from tests.kernel.harness import PATIENCE_S, data_directory, running
from tests.waiting import patience, until

NSINIT_REQUESTS = 150
RUNNERS = 8
ARCHIVES = 12


def _tree(directory: Path) -> dict[str, str]:
    """Return every path below a directory with a digest of what is there."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(
            path.read_bytes() if path.is_file() and not path.is_symlink() else os.fsencode(path.name)
        ).hexdigest()
        for path in directory.rglob("*")
    }


def test_a_daemon_that_lies_gets_answers_and_reaches_nothing() -> None:
    """Requests of the grammar with hostile values: each is answered, nsinit serves on, and nothing is made."""
    seed = random.SystemRandom().getrandbits(32)
    chooser = random.Random(seed)
    classes = [cls for cls in REQUESTS.classes if cls is not Start]
    with data_directory() as data_dir, running(data_dir) as server:
        (data_dir / "canary").write_text("sings")
        before = _tree(data_dir)
        asked = 0
        while asked < NSINIT_REQUESTS:
            choices = Choices(chooser.randbytes(200))
            request = grammar.spoiled_json(choices, grammar.message(choices, classes) | {"seq": 1000 + asked})
            try:
                decoded = REQUESTS.decode(request)
            except ProtocolError:
                continue  # bytes that are no request end nsinit, which has to live here
            if len(request) > MAX_DATAGRAM_BYTES // 2 or _is_sound(decoded):
                continue
            server.channel.send(request)
            answer, fds = server.receive()
            assert (answer.seq, fds) == (decoded.seq, []), (seed, request)
            asked += 1
        assert isinstance(server.ask(Scan)[0], Scanned), seed
        assert server.scan() == {}, seed
        assert _tree(data_dir) == before, seed
        assert "Traceback" not in server.log, (seed, server.log)


def _is_sound(request: object) -> bool:
    """Tell whether a request is one that a good daemon may send and that leaves traces."""
    try:
        match request:
            case Build(plan=plan):
                check_plan(plan)
            case Prepare(session_id=session_id, limits=limits):
                check_session_id(session_id)
                check_limits(limits)
            case MakeWorkspace(workspace_id=workspace_id):
                check_workspace_id(workspace_id)
            case DeleteImage(name=name):
                return name == "host"  # the image that there is
            case _:
                return False
    except InvalidName:
        return False
    return True


def test_bytes_that_are_no_request_end_nsinit_in_good_order() -> None:
    """Bytes that are no request make nsinit hang up and exit: no sandbox is left and no traceback is logged."""
    seed = random.SystemRandom().getrandbits(32)
    with data_directory() as data_dir, running(data_dir) as server:
        server.channel.send(random.Random(seed).randbytes(300))
        poller = select.poll()
        pidfd = os.pidfd_open(server.pid)
        poller.register(pidfd, select.POLLIN)
        assert poller.poll(patience(PATIENCE_S) * 1000), seed
        os.close(pidfd)
        assert "Traceback" not in server.log, (seed, server.log)
        server.close()


def _lie(choices: Choices, request: object) -> bytes:
    """Return what a runner might say to a request: a right answer most of the time, spoiled here and there."""
    exec_id = getattr(request, "exec_id", "x")
    reply = {
        "type": "ExecReply", "exec_id": exec_id, "exit_code": 0, "signal": None, "cause": "exited", "cwd": "/tmp",
        "duration_us": 5, "shell_restarted": False,
    }  # fmt: skip
    said = b""
    for kind, body in (
        (Kind.STARTED, {"type": "Started", "exec_id": exec_id}),
        (Kind.STDOUT, None),
        (Kind.REPLY, reply if choices.number(3) else grammar.message(choices, RUNNER_ANSWERS)),
    ):
        data = choices.blob(32) if body is None else grammar.spoiled_json(choices, body)
        said += encode_frame(choices.pick(list(Kind)) if choices.one_in(10) else kind, data)
    return grammar.damage(choices, said) if choices.one_in(4) else said


async def test_a_runner_that_lies_crashes_its_session_at_most(supervisor: LocalSupervisor, data_dir: Path) -> None:
    """A typed error or a result, in bounded time; a session is crashed if and only if the protocol was broken."""
    seed = random.SystemRandom().getrandbits(32)
    chooser = random.Random(seed)
    witness = await supervisor.create(SessionSpec())
    for number in range(RUNNERS):
        choices = Choices(chooser.randbytes(400))
        attacked = await supervisor.create(SessionSpec())
        outcome: SandkastenError | None = None
        async with trio.open_nursery() as nursery:
            async with supervisor.open_exec(attacked.id, ExecSpec("sleep 60")):  # takes the connection that is open
                with _impostor(data_dir / "run" / attacked.id / "r.sock") as listener:

                    async def answer(stream: trio.SocketStream, choices: Choices = choices) -> None:
                        decoder = FrameDecoder(FROM_DAEMON, max_body_bytes=MAX_REQUEST_BYTES)
                        decoder.feed(await stream.receive_some(65536))
                        _, body = next(decoder)
                        await stream.send_all(_lie(choices, RUNNER_REQUESTS.decode(body)))
                        await stream.aclose()

                    nursery.start_soon(trio.serve_listeners, answer, [listener])
                    with trio.fail_after(patience(PATIENCE_S)):
                        try:
                            await supervisor.exec(attacked.id, ExecSpec("true", timeout_ms=500))
                        except SandkastenError as error:
                            outcome = error
            nursery.cancel_scope.cancel()
        if isinstance(outcome, RunnerProtocolError):
            await until(lambda attacked=attacked: _has_crashed(supervisor, attacked.id))  # type: ignore[misc]
        else:
            status = (await supervisor.get(attacked.id)).status
            assert status is Status.RUNNING, (seed, number, outcome)
        await supervisor.destroy(attacked.id)
    assert (await supervisor.exec(witness.id, ExecSpec("echo fine"))).stdout == b"fine\n", seed


@contextmanager
def _impostor(path: Path) -> Iterator[trio.SocketListener]:
    """Listen where the runner did."""
    path.unlink()
    directory_fd = os.open(path.parent, os.O_PATH)  # sun_path holds 108 bytes
    with socket.socket(socket.AF_UNIX) as plain:
        plain.bind(f"/proc/self/fd/{directory_fd}/{path.name}")
        os.close(directory_fd)
        plain.listen()
        yield trio.SocketListener(trio.socket.from_stdlib_socket(plain))


async def _has_crashed(supervisor: LocalSupervisor, session_id: str) -> bool:
    return (await supervisor.get(session_id)).status is Status.CRASHED


def _archive(choices: Choices) -> bytes:
    """A tar of members with hostile names, links and kinds; its bytes are spoiled now and then."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=choices.pick((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as tar:
        for name in ("etc", "usr/bin", "bin"):
            member = tarfile.TarInfo(name)
            member.type = choices.pick((tarfile.DIRTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE))
            member.linkname = "../../.."
            tar.addfile(member)
        for _ in range(choices.number(8)):
            member = tarfile.TarInfo(choices.pick(_NAMES))
            member.type = choices.pick((b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"x", b"g", b"L"))
            member.linkname = choices.pick(_NAMES)
            member.mode, member.mtime = choices.pick((0o644, 0o6755, 0o7777)), choices.pick((0, 2**31, -1))
            member.uid = choices.pick((0, 1000, 2**21 - 1))
            content = choices.blob(64)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    data = stream.getvalue()
    return grammar.damage(choices, data) if choices.one_in(3) else data


_NAMES = (
    *("a", "../../../canary", "/canary", "etc/passwd", "usr/bin/sh", "bin/sh", ".", "..", "a/../../b", "x" * 300),
    *("etc/x/y", "\udcff", "usr/lib/.wh..wh..opq", ".wh.etc", "bin", "dev/null", "a" + "/b" * 60),
)


def test_an_archive_that_lies_is_an_image_or_refused(data_dir: Path) -> None:
    """Nothing outside of the new image is touched, and a refusal leaves nothing."""
    seed = random.SystemRandom().getrandbits(32)
    chooser = random.Random(seed)
    (data_dir / "canary").write_text("sings")
    catalog = Catalog(data_dir / "data")
    for number in range(ARCHIVES):
        tar = data_dir / "image.tar"
        tar.write_bytes(_archive(Choices(chooser.randbytes(600))))
        try:
            import_tar(catalog, f"image-{number}", tar, max_members=100, max_bytes=10_000)
        except InvalidImage:
            assert not list((catalog.data_dir / "images").glob(f"image-{number}*")), seed
        assert (data_dir / "canary").read_text() == "sings", seed
        assert {path.name for path in data_dir.iterdir()} == {"canary", "data", "image.tar"}, seed


@pytest.mark.parametrize("damage", range(2))
def test_the_lies_are_not_all_junk(damage: int) -> None:
    """Some of the fuzzers' messages pass and some do not; otherwise they would test nothing."""
    chooser = random.Random(damage)
    kinds = set()
    for _ in range(200):
        choices = Choices(chooser.randbytes(200))
        try:
            RUNNER_REQUESTS.decode(grammar.spoiled_json(choices, grammar.message(choices, RUNNER_REQUESTS.classes)))
            kinds.add("taken")
        except ProtocolError as error:
            kinds.add(str(error).split(":")[0])
    assert "taken" in kinds
    assert len(kinds) > 8
