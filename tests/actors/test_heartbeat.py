"""The watchdog hears of us only while everything that has to answer does."""

from __future__ import annotations

import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from errno import EIO
from pathlib import Path

import pytest
import trio
import trio.testing

from nsinit.wire.protocol import Failed, Scan
from sandkasten.actors import tree as tree_module
from sandkasten.actors.node_view import keep_beating
from sandkasten.actors.services.store import do
from sandkasten.host.notify import Notifier, open_notifier
from tests.fakes.tree import ScriptedTree, open_scripted
from tests.waiting import patience

BEAT_S = 0.02
ALIVE = "WATCHDOG=1"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


@pytest.fixture
def notifier(manager: socket.socket) -> Iterator[Notifier]:
    """A notifier whose watchdog wants to hear of us every `BEAT_S` seconds."""
    usec = round(3 * BEAT_S * 1e6)
    opened = open_notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": str(usec)})
    yield opened
    opened.close()


async def hear(manager: socket.socket) -> str:
    """Return the first line of the next message."""
    with trio.fail_after(patience()):
        await trio.lowlevel.wait_readable(manager)
    return manager.recv(4096).decode().splitlines()[0]


async def hear_other(manager: socket.socket) -> str:
    """Return the first line of the next message that is no sign of life."""
    while (line := await hear(manager)) == ALIVE:
        pass
    return line


def rename(tree: ScriptedTree, old: str, new: str) -> None:
    """Take a table of the database away, or bring it back."""
    with closing(sqlite3.connect(tree.supervisor._config.db_path)) as database:
        database.execute(f"ALTER TABLE {old} RENAME TO {new}")


async def test_signs_of_life_stop_with_the_parts_that_must_answer(
    manager: socket.socket, notifier: Notifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs come in the watchdog's time. A database or fork server that is ill is named instead of a sign; a full disk
    stops no sign.
    """
    async with open_scripted() as tree, trio.open_nursery() as nursery:
        began = trio.current_time()
        nursery.start_soon(keep_beating, tree.supervisor, notifier)
        assert [await hear(manager) for _ in range(3)] == [ALIVE] * 3
        assert trio.current_time() - began >= 2 * BEAT_S
        tree.nsinit.refusals[Scan] = Failed(0, "scan", "", EIO, "is ill")
        assert "is ill" in (line := await hear_other(manager))
        assert line.startswith("STATUS=nsinit: ")
        assert await hear(manager) == ALIVE
        rename(tree, "node", "gone")
        assert (line := await hear_other(manager)).startswith("STATUS=store: ")
        assert [await hear(manager) for _ in range(2)] == [line] * 2
        rename(tree, "gone", "node")
        while await hear(manager) != ALIVE:
            pass
        monkeypatch.setattr(tree_module, "_MIN_FREE_RATIO", 1.0)
        assert not (await tree.supervisor.readiness()).ready
        assert [await hear(manager) for _ in range(3)] == [ALIVE] * 3
        nursery.cancel_scope.cancel()


async def test_a_part_that_never_answers_is_no_sign_of_life(manager: socket.socket, notifier: Notifier) -> None:
    """A daemon that waits for the readiness of a hung part sends no sign of life."""
    is_over = threading.Event()

    def hang(_database: sqlite3.Connection) -> None:
        is_over.wait()

    async with open_scripted() as tree, trio.open_nursery() as nursery:
        nursery.start_soon(tree.supervisor._store.ask, do(hang))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(keep_beating, tree.supervisor, notifier)
        await trio.sleep(10 * BEAT_S)
        with pytest.raises(BlockingIOError):
            manager.recv(4096)
        is_over.set()
        assert await hear(manager) == ALIVE
        nursery.cancel_scope.cancel()
