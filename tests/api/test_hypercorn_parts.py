"""Parts of hypercorn on which the daemon relies although they are not documented. A new version that changes one fails
here, by name.
"""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from typing import Any

import trio
from wsproto.events import Ping

from sandkasten.api.http.server import hypercorn_config
from sandkasten.api.http.settings import ApiSettings
from tests.waiting import patience


def test_the_version_is_the_one_that_was_examined() -> None:
    """The faults that are cured from outside are those of 0.18."""
    assert version("hypercorn").startswith("0.18.")


def test_tcp_server_takes_app_config_context_state_and_stream() -> None:
    """`TCPServer(...).run()` serves one connection; `_read_data` and `idle_task` are what ends it early."""
    from hypercorn.trio.tcp_server import TCPServer

    assert list(inspect.signature(TCPServer).parameters) == ["app", "config", "context", "state", "stream"]
    assert inspect.iscoroutinefunction(TCPServer.run)
    assert inspect.iscoroutinefunction(TCPServer._read_data)


def test_a_connection_speaks_http_1_through_h11_protocol() -> None:
    """`ProtocolWrapper.protocol` can be replaced by one that is made from the wrapper's own attributes."""
    from hypercorn.config import Config
    from hypercorn.protocol import ProtocolWrapper
    from hypercorn.protocol.h11 import H11Protocol
    from hypercorn.trio.worker_context import WorkerContext

    nothing: Any = None  # the constructor only stores these
    wrapper = ProtocolWrapper(
        nothing, Config(), WorkerContext(None), nothing, nothing, False, None, None, nothing, "http/1.1"
    )
    assert isinstance(wrapper.protocol, H11Protocol)
    wanted = ["app", "config", "context", "task_group", "connection_state", "ssl", "client", "server", "send"]
    assert list(inspect.signature(H11Protocol).parameters) == wanted
    names = {"state" if name == "connection_state" else name for name in wanted}
    assert names <= set(vars(wrapper))
    assert list(inspect.signature(H11Protocol._check_protocol).parameters) == ["self", "event"]


def test_what_hypercorn_answers_by_itself_passes_one_method() -> None:
    """Bytes that are no HTTP are answered by a method that can be overridden."""
    from hypercorn.protocol.h11 import H11Protocol

    assert list(inspect.signature(H11Protocol._send_error_response).parameters) == ["self", "status_code"]
    assert "_send_error_response" in inspect.getsource(H11Protocol._handle_events)


def test_a_stream_is_made_by_a_method_of_the_protocol() -> None:
    """`_create_stream` decides what a request becomes; what takes its place has `handle`, and the protocol `stream`,
    which a `StreamClosed` ends.
    """
    from hypercorn.protocol.h11 import H11Protocol, H11WSConnection

    assert list(inspect.signature(H11Protocol._create_stream).parameters) == ["self", "request"]
    source = inspect.getsource(H11Protocol)
    assert "self.stream = WSStream(" in source
    assert "self.stream = HTTPStream(" in source
    assert "self._maybe_recycle()" in inspect.getsource(H11Protocol.stream_send)
    assert set(re.findall(r"self\.stream\.(\w+)", source)) == {"handle"}
    assert list(inspect.signature(H11WSConnection).parameters) == ["h11_connection"]


def test_a_handshake_offers_no_extension_when_none_was_asked_for() -> None:
    """`accept` answers with what the headers ask; without them nothing is negotiated."""
    from hypercorn.protocol.ws_stream import Handshake

    wanted = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket"), (b"sec-websocket-version", b"13")]
    handshake = Handshake([*wanted, (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ==")], "1.1")
    assert handshake.is_valid()
    status, headers, connection = handshake.accept(None, [])
    assert (status, dict(headers).get(b"sec-websocket-extensions")) == (101, None)
    assert connection.send(Ping()) == b"\x89\x00"


async def test_a_stopped_idle_task_stays_stopped() -> None:
    """`TrioSingleTask.stop` may be called when nothing runs."""
    from hypercorn.trio.worker_context import TrioSingleTask

    with trio.fail_after(patience(1)):
        await TrioSingleTask().stop()


def test_the_idle_task_is_only_started_anew_and_stopped() -> None:
    """A deadline of ours stands in its place, and has those two methods."""
    from hypercorn.trio.tcp_server import TCPServer

    source = inspect.getsource(TCPServer)
    assert set(re.findall(r"self\.idle_task\.(\w+)", source)) == {"restart", "stop"}
    assert "await self.idle_task.restart(self._task_group, self._idle_timeout)" in source


def test_all_bytes_of_a_connection_pass_one_method() -> None:
    """`protocol_send` writes under `send_lock`, which is taken before another task has a turn if the lock is free."""
    from hypercorn.trio.tcp_server import TCPServer

    source = inspect.getsource(TCPServer)
    assert source.count("self.stream.send_all(") == 1
    assert "async with self.send_lock:" in inspect.getsource(TCPServer.protocol_send)


async def test_worker_context_has_the_event_that_ends_idle_connections() -> None:
    """`terminated` is set on stop; without `max_requests` nothing else sets it."""
    from hypercorn.trio.worker_context import WorkerContext

    context = WorkerContext(None)
    await context.mark_request()
    assert not context.terminate.is_set()
    assert not context.terminated.is_set()
    await context.terminated.set()
    assert context.terminated.is_set()


def test_connection_state_is_a_dict() -> None:
    """`ConnectionState` is a name for `dict` in annotations only."""
    from hypercorn.typing import ConnectionState

    assert ConnectionState({}) == {}


def test_the_configuration_has_every_name_that_is_set() -> None:
    """A misspelt or renamed setting would be silently ignored."""
    from hypercorn.config import Config

    ours = vars(hypercorn_config(ApiSettings()))
    assert {name for name in ours if not name.startswith("_")} <= set(dir(Config))
