"""Attacks through a way out that reaches a server: requests that it would read as another host's, and crowds.

The server is the attack's own, at the loopback of the node, which a supervisor of the attack's own permits: no public
address is dialled. What that server received, and what another session measured meanwhile, are the truth.

Sources: RFC 9110, 7.2; RFC 9112, 3.2, 6.1 and 6.3.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import orjson
import trio

from sandkasten.app import open_supervisor
from sandkasten.model.network import Network, NetworkMode
from sandkasten.security.attacks.field import Field
from sandkasten.security.attacks.ways_out import AT_ONCE, TOOLS
from sandkasten.security.probes.attempt import Answers, NotApplicable, attempt, collect

_NAME = "localhost"
_IN_TIME_S = 3.0
"""The longest that a connect with its answer may take another session, on a machine that is not slow."""
_IN_TIME, _MANY = "in time", 200
_ARRIVED, _ABSENT, _GOT = "arrived", "never came", "the server got it"

_CONNECT = f"""{TOOLS}
import functools
@functools.cache
def address():
    answer = ask("{_NAME}", 20)
    if answer[6:8] == b"\\0\\0":
        sys.exit("the way out gives {_NAME} no address: code %d" % (answer[3] & 15))
    return socket.inet_ntoa(answer[-4:])
def connect(port, seconds=20):
    return socket.create_connection((address(), port), timeout=seconds)
"""
_SAY = f"""{AT_ONCE}
def say(pieces):
    try:
        with connect(PORT) as client:
            for piece in pieces:
                client.sendall(piece.encode("latin-1"))
                client.settimeout(1)
                client.recv(65536)
            while client.recv(65536):
                pass
    except OSError:
        pass
at_once(say, [(each,) for each in json.loads(TEXT)])
"""
_CROWD = """
import signal
held = []
for number in range(400):
    try:
        client = connect(PORT, 4)
        sent = SENT[number % len(SENT)]
        client.sendall(sent or b"")
        if sent is None:
            client.shutdown(socket.SHUT_WR)
        held.append(client)
    except OSError:  # beyond the limit
        break
signal.pause()
"""
_MEASURE = """
began = time.monotonic()
try:
    with connect(PORT) as client:
        client.sendall(b"GET /measured HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
        said = client.recv(65536)
    print(said[:12].decode(), time.monotonic() - began)
except OSError as error:
    print(type(error).__name__, time.monotonic() - began)
"""


def _request(path: str, *fields: str, host: str = _NAME, method: str = "GET", body: str = "") -> str:
    return "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {host}", *fields, "", body))


def _post(*fields: str, body: str) -> str:
    return _request("/", *fields, method="POST", body=body)


_HIDDEN = _request("/hidden", host="other.example")
_LAST_CHUNK = f"0\r\n\r\n{_HIDDEN}"
_CHUNKED, _LENGTH = "Transfer-Encoding: chunked", f"Content-Length: {len(_LAST_CHUNK)}"
_SECOND_REQUESTS: dict[str, tuple[str, ...]] = {
    "after the answer": (_request("/"), _HIDDEN),
    "in one piece": (_request("/") + _HIDDEN,),
    "after many": (_request("/") * 20 + _HIDDEN,),
    "after a body": (_post("Content-Length: 2", body="ab") + _HIDDEN,),
    "after chunks": (_post(_CHUNKED, body="2\r\nab\r\n0\r\n\r\n") + _HIDDEN,),
    "two Hosts": (_request("/"), _request("/hidden", "Host: other.example")),
    "an absolute target": (_request("/"), _request("http://other.example/hidden")),
    "CONNECT": (_request("/"), _request("other.example:80/hidden", method="CONNECT")),
    "another port": (_request("/"), _request("/hidden", host=f"{_NAME}:1")),
    "no Host": (_request("/"), "GET /hidden HTTP/1.0\r\n\r\n"),
    "bare line feeds": (_request("/"), _HIDDEN.replace("\r\n", "\n")),
    "HTTP/0.9": (_request("/"), "GET /hidden\r\n"),
}
_SMUGGLED: dict[str, tuple[str, ...]] = {
    "length, chunked": (_post(_LENGTH, _CHUNKED, body=_LAST_CHUNK),),
    "chunked, length": (_post(_CHUNKED, _LENGTH, body=_LAST_CHUNK),),
    "short length, chunked": (_post("Content-Length: 3", _CHUNKED, body=f"0\r\n{_HIDDEN}"),),
    "two lengths": (_post("Content-Length: 0", _LENGTH, body=_LAST_CHUNK),),
    "signed length": (_post(f"Content-Length: +{len(_LAST_CHUNK)}", body=_LAST_CHUNK),),
    "chunked twice": (_post(_CHUNKED, _CHUNKED, body=_LAST_CHUNK),),
    "another coding": (_post("Transfer-Encoding: identity", _LENGTH, body=_LAST_CHUNK),),
    "misspelt coding": (_post("Transfer-Encoding: xchunked", _LENGTH, body=_LAST_CHUNK),),
    "blank before colon": (_post("Transfer-Encoding : chunked", _LENGTH, body=_LAST_CHUNK),),
    "tab in coding": (_post("Transfer-Encoding: \x0bchunked", _LENGTH, body=_LAST_CHUNK),),
    "folded coding": (_post("Transfer-Encoding:\r\n chunked", _LENGTH, body=_LAST_CHUNK),),
    "wrong size of a chunk": (_post(_CHUNKED, body=f"0x0\r\n\r\n{_HIDDEN}"),),
}
"""Requests whose end two readers may see at different places (RFC 9112, 11.2)."""


@attrs.define
class _Recorder:
    """A server of the node, and all bytes that it received; `is_silent`: it answers nothing."""

    is_silent: bool
    port: int = 0
    connections: int = 0
    received: bytes = b""

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
        self.port = listeners[0].socket.getsockname()[1]
        await trio.serve_listeners(self._answer, listeners, task_status=task_status)  # type: ignore[arg-type]

    async def _answer(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        try:
            async for data in stream:
                self.received += data
                if not self.is_silent:
                    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
                    await stream.send_all(answer * max(1, data.count(b"\r\n\r\n")))
        except trio.BrokenResourceError:  # the way out has reset it
            pass


@asynccontextmanager
async def _reaching(field: Field) -> AsyncIterator[tuple[Field, _Recorder, _Recorder]]:
    """Yield a field whose sessions may reach two servers of the node: one that answers, and a silent one."""
    if os.geteuid() != 0 or field.config.egress.upstream_proxy:
        raise NotApplicable("this attack has a server at the loopback, which root permits on a node without a proxy")
    try:
        await trio.socket.getaddrinfo(_NAME, None, family=socket.AF_INET)
    except OSError as error:
        raise NotApplicable(f"this attack needs {_NAME} in /etc/hosts: {error}") from None
    answering, silent = _Recorder(is_silent=False), _Recorder(is_silent=True)
    with tempfile.TemporaryDirectory(prefix="permitted-", dir=field.outside.parent) as directory:
        permit = (*field.config.egress.permit, "127.0.0.1/32")
        config = attrs.evolve(
            field.config,
            data_dir=Path(directory),
            db_path=Path(directory, "sandkasten.db"),
            egress=attrs.evolve(field.config.egress, permit=permit),
        )
        async with trio.open_nursery() as nursery, open_supervisor(config) as supervisor:
            await nursery.start(answering.serve)
            await nursery.start(silent.serve)
            yield attrs.evolve(field, supervisor=supervisor, config=config), answering, silent
            nursery.cancel_scope.cancel()


def _to(*servers: _Recorder) -> Network:
    return Network(NetworkMode.ALLOW, allow=[f"{_NAME}:{each.port}" for each in servers])


async def _say(field: Field, requests: dict[str, tuple[str, ...]]) -> Answers:
    """Send these requests, each on a connection of its own; return whether the server saw the hidden one."""
    async with _reaching(field) as (reaching, server, _silent), reaching.session(network=_to(server)) as session_id:
        said = [
            [each.replace("/hidden", f"/hidden-{n}-") for each in texts] for n, texts in enumerate(requests.values())
        ]
        texts = orjson.dumps([*said, [_request("/right")]]).decode()
        await reaching.python(session_id, f"{_CONNECT}PORT, TEXT = {server.port}, {texts!r}\n{_SAY}")
        answers = {
            name: _GOT if f"/hidden-{n}-".encode() in server.received else _ABSENT for n, name in enumerate(requests)
        }
        return {**answers, "the right one": _ARRIVED if b"GET /right " in server.received else _ABSENT + " either"}


@attempt("upstream.second-request", "reach another host of the same server by a later request of a connection",
         "domain fronting", (_ABSENT, _ARRIVED))  # fmt: skip
async def name_another_host(field: Field) -> Answers:
    return await _say(field, _SECOND_REQUESTS)


@attempt("upstream.smuggling", "hide a request for another host in the body of an allowed one", "CWE-444",
         (_ABSENT, _ARRIVED))  # fmt: skip
async def smuggle(field: Field) -> Answers:
    return await _say(field, _SMUGGLED)


async def _crowd(field: Field, sent: Sequence[bytes | None]) -> Answers:
    """Have a session hold connections to a silent server, as many as it may have, and another one measure a connect
    with its answer. Each connection sends one of `sent`; None is the end of its stream."""
    async with (
        _reaching(field) as (reaching, server, silent),
        reaching.session(network=_to(silent)) as attacker,
        reaching.session(network=_to(server)) as other,
        trio.open_nursery() as nursery,
    ):

        async def hold() -> None:
            program = f"{_CONNECT}PORT, SENT = {silent.port}, {sent!r}\n{_CROWD}"
            ended = await reaching.python(attacker, program)
            why = ended.stderr[-80:].decode(errors="replace").strip() or ended.end.cause
            raise RuntimeError(f"a crowd of {silent.connections} that has ended proves nothing: {why}")

        nursery.start_soon(hold)
        while silent.connections < _MANY:  # noqa: ASYNC110 - a session holds as many as it gets
            await trio.sleep(0.05)
        answers = {turn: await _measure(reaching, other, server) for turn in ("first", "second", "third")}
        with trio.move_on_after(_IN_TIME_S * field.patience) as daemon:
            await reaching.run(other, "true")
        nursery.cancel_scope.cancel()
    return {**answers, "daemon": "silent" if daemon.cancelled_caught else _IN_TIME}


async def _measure(field: Field, session_id: str, server: _Recorder) -> str:
    result = await field.python(session_id, f"{_CONNECT}PORT = {server.port}\n{_MEASURE}")
    said, _, seconds = result.stdout.decode().strip().rpartition(" ")
    if said != "HTTP/1.1 200":
        return said or result.stderr[-60:].decode(errors="replace")
    return _IN_TIME if float(seconds) < _IN_TIME_S * field.patience else f"after {seconds} s"


@attempt("upstream.silent-server", "keep the process that carries connections waiting for answers that never come",
         "denial of service", (_IN_TIME,))  # fmt: skip
async def wait_for_ever(field: Field) -> Answers:
    return await _crowd(field, [_request("/").encode()])


@attempt("upstream.crowd", "crowd the way out with connections that are idle, half closed, or half a request",
         "denial of service", (_IN_TIME,))  # fmt: skip
async def say_nothing(field: Field) -> Answers:
    return await _crowd(field, [b"", None, b"GET / HT", b"\x16\3\1"])


WAYS_OUT_SERVERS = collect(globals())
