"""The server in memory that programs test themselves with: in use, and held to the real one."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkasten import errors, sync, testing
from sandkasten.api.http.errors import STATUS
from sandkasten.sdk import SandboxClient
from sandkasten.testing import FakeServer, FakeSession, Said
from tests.sdk.twin import FLAVOURS, run


async def use(client: SandboxClient, server: FakeServer) -> None:
    """Everything that the fake has, by the client."""
    server.answer("pytest -q", "3 passed\n", stderr="slow\n")
    server.answer("sleep 60", seconds=60)
    server.answer("cd /tmp", cwd="/tmp")
    box = await client.create_session(labels={"job": "7"}, idempotency_key="once")
    assert (await client.create_session(labels={"job": "7"}, idempotency_key="once")).id == box.id
    assert [each.id async for each in client.sessions(label="job=7")] == [box.id]
    assert [each.id async for each in client.sessions(label="other")] == []
    result = await box.exec("pytest -q", separate=True)
    assert (result.check().output, result.stdout, result.stderr) == ("3 passed\nslow\n", "3 passed\n", "slow\n")
    assert (await box.exec_bytes("pytest -q")).stdout == b"3 passed\n"
    assert (await box.exec("nothing")).exit_code == 127
    with pytest.raises(errors.CommandTimeout):
        await box.exec("sleep 60", timeout_ms=1000)
    assert (await box.exec("cd /tmp", exec_id="a")).cwd == (await box.exec("cd /tmp", exec_id="a")).cwd == "/tmp"
    with pytest.raises(errors.Conflict):
        await box.exec("ls", exec_id="a")
    assert server.sessions[box.id].commands == ["pytest -q", "pytest -q", "nothing", "sleep 60", "cd /tmp"]
    chunks = [chunk async for chunk in box.exec_stream("pytest -q")]
    assert [(each.output, each.stream) for each in chunks[:-1]] == [("3 passed\n", "stdout"), ("slow\n", "stderr")]
    async with box.start("pytest -q", raw=True) as started:
        assert [each.data async for each in started] == [b"3 passed\n", b"slow\n"]
    await box.write("d/a.txt", "hello")
    assert (await box.read("d/a.txt", max_bytes=2)).truncated
    assert (await box.files.write("d/b", b"12345")).path == "/workspace/d/b"
    assert await box.files.read_bytes("d/b", offset=1, length=2) == b"23"
    assert [each.name for each in await box.files.list("d")] == ["a.txt", "b"]
    assert (await box.files.stat("d")).is_dir
    assert await box.files.exists("d/a.txt")
    assert await box.upload(__file__, dest_path="/workspace/up") == ["/workspace/up/test_testing.py"]
    with pytest.raises(errors.FileNotFound):
        await box.read("missing")
    with pytest.raises(errors.IsADirectory):
        await box.read("d")
    with pytest.raises(errors.NotEmpty):
        await box.files.remove("d")
    await box.files.remove("d", recursive=True)
    await box.files.mkdir("e/f")
    assert [each.path for each in await box.files.list(depth=2)][-2:] == [
        "/workspace/up",
        "/workspace/up/test_testing.py",
    ]
    server.refuse(503, errors.Capacity("full"))
    assert (await box.stats()).memory_bytes > 0  # repeated
    server.refuse(409, errors.ShellBusy("busy"))
    with pytest.raises(errors.ShellBusy):
        await box.exec("pytest -q")
    with pytest.raises(errors.RouteNotFound):
        await box.pause()
    await box.destroy()
    assert (await box.info()).status == "destroyed"
    with pytest.raises(errors.SessionExpired):
        await box.exec("pytest -q")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_program_is_tested_with_it(flavour: str, server: FakeServer) -> None:
    """By clients of every kind."""
    run(flavour, use, functools.partial(_client, server.url), server)


def _client(url: str, cls: Callable[..., Any]) -> Any:  # the class of a client, and the client
    return cls(base_url=url)


def test_a_function_may_answer_commands() -> None:
    """With the session's files at hand; a command that the function does not know is not found."""

    def answer(command: str, session: FakeSession) -> Said:
        name, _, path = command.partition(" ")
        return {"cat": lambda: Said(session.read(path).decode())}[name]()

    with FakeServer(answer) as server, sync.SandboxClient(base_url=server.url) as client:
        box = client.create_session()
        box.write("f", "content")
        assert box.exec("cat f").output == "content"
        assert box.exec("rm f").exit_code == 127


def test_errors_have_the_statuses_of_the_real_server() -> None:
    """Each that the fake raises is in the daemon's table with the same status."""
    calls = [node for node in ast.walk(ast.parse(Path(testing.__file__).read_text())) if isinstance(node, ast.Call)]
    said = {
        (node.args[1].func.attr, node.args[0].value)
        for node in calls
        if ast.unparse(node.func) == "FakeRefusal"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[1], ast.Call)
        and isinstance(node.args[1].func, ast.Attribute)
    }
    assert len(said) > 6
    assert said <= {(cls.__name__, status) for cls, status in STATUS.items()}
