"""The watchdog hears of us only while everything that has to answer does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from sandkasten.actors.node_view import keep_beating
from sandkasten.host.notify import Notifier, open_notifier
from sandkasten.model.node import Readiness
from tests.fakes.supervisor import FakeSupervisor


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


@pytest.fixture
def notifier(manager: socket.socket) -> Iterator[Notifier]:
    """A notifier whose watchdog wants to hear of us every second."""
    opened = open_notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "3000000"})
    yield opened
    opened.close()


def heard(manager: socket.socket) -> list[str]:
    """Return the first line of each message that came."""
    lines = []
    while True:
        try:
            lines.append(manager.recv(4096).decode().splitlines()[0])
        except BlockingIOError:
            return lines


async def test_signs_of_life_stop_with_the_parts_that_must_answer(
    manager: socket.socket, notifier: Notifier, autojump_clock: trio.testing.MockClock
) -> None:
    """Signs come every third of the watchdog's time. A database or fork server that is gone is named instead of a sign;
    a full disk stops no sign.
    """
    supervisor = FakeSupervisor()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_beating, supervisor, notifier)
        await trio.sleep(2.5)
        assert heard(manager) == ["WATCHDOG=1"] * 3
        for name in ("store", "zygote"):
            supervisor.readiness_checks[name] = "does not answer"
            await trio.sleep(1)
            assert heard(manager) == [f"STATUS={name}: does not answer"]
            supervisor.readiness_checks[name] = "ok"
        supervisor.readiness_checks["disk"] = "full"
        await trio.sleep(1)
        assert heard(manager) == ["WATCHDOG=1"]
        nursery.cancel_scope.cancel()


async def test_a_part_that_never_answers_is_no_sign_of_life(
    manager: socket.socket, notifier: Notifier, autojump_clock: trio.testing.MockClock
) -> None:
    """A daemon that waits for the readiness of a hung part sends no sign of life."""

    class Stuck(FakeSupervisor):
        async def readiness(self) -> Readiness:
            await trio.sleep_forever()

    with trio.move_on_after(10):
        await keep_beating(Stuck(), notifier)
    assert heard(manager) == []
