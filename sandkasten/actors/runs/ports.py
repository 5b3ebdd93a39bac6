"""The TCP ports on which processes of a session listen, as PID 1 reports them; passed on as events.

Watching begins with the first run, since no process could listen before. The reports of PID 1 are bounded here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import trio

from runner.wire import protocol
from runner.wire.protocol import Kind
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.errors import RunnerLost, RunnerProtocolError
from sandkasten.links.runner import RunnerConnection, decode_answer
from sandkasten.model import EventType, Port

_MAX_PORTS = 1024
_MAX_PORT = 65535
_MAX_ADDRESS_CHARS = 64
_MINUTE_S = 60.0
_MAX_TOLD = 240
"""Port events of one session in a minute: all sessions share the journal."""


class Ports:
    """See the module's docstring."""

    def __init__(self, host: SessionServices) -> None:
        self._host = host
        self._open: dict[Port, None] = {}
        self._changed = trio.Event()
        self._is_watching = False
        self._minute_began = -math.inf
        self._told = 0

    def ensure_watched(self) -> None:
        """Begin to watch, unless that has been done."""
        if not self._is_watching:
            self._is_watching = True
            self._host.start_task(self._watch)

    def list(self) -> Sequence[Port]:
        """Return the open ports, by number."""
        return sorted(self._open, key=lambda port: (port.port, port.address))

    async def wait_open(self, number: int) -> None:
        """Wait until a process listens on a port of that number."""
        while all(port.port != number for port in self._open):
            await self._changed.wait()

    async def _watch(self) -> None:
        try:
            async with self._host.link.connection() as connection:
                await connection.send_request(protocol.Watch())
                self._open.clear()  # PID 1 begins with all open ports
                while True:
                    await self._take(connection)
        except RunnerProtocolError as error:
            self._host.distrust(error)
        except RunnerLost:  # dead, which the watch of PID 1 reports, or too busy
            self._is_watching = False

    async def _take(self, connection: RunnerConnection) -> None:
        kind, body = await connection.receive()
        message = decode_answer(kind, body)
        match message:
            case protocol.PortOpened(port, address) if kind is Kind.EVENT and _is_port(port, address):
                if len(self._open) < _MAX_PORTS and Port(port, address) not in self._open:
                    self._open[Port(port, address)] = None
                    self._tell(EventType.PORT_OPENED, port, address)
            case protocol.PortClosed(port, address) if kind is Kind.EVENT and _is_port(port, address):
                if Port(port, address) in self._open:
                    del self._open[Port(port, address)]
                    self._tell(EventType.PORT_CLOSED, port, address)
            case protocol.Started() if kind is Kind.STARTED:
                pass
            case _:
                raise RunnerProtocolError(f"{type(message).__name__} while ports are watched")

    def _tell(self, event: EventType, port: int, address: str) -> None:
        now = trio.current_time()
        if now - self._minute_began > _MINUTE_S:
            self._minute_began, self._told = now, 0
        self._told += 1
        if self._told <= _MAX_TOLD:  # a client can ask for the ports that a flood left out
            self._host.emit(event, port=port, address=address)
        self._changed.set()
        self._changed = trio.Event()


def _is_port(number: int, address: str) -> bool:
    return 0 < number <= _MAX_PORT and 0 < len(address) <= _MAX_ADDRESS_CHARS
