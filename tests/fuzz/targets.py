"""Fuzz targets: each makes bytes into hostile input for one parser and raises only if a property is broken.

The properties are the same everywhere: the parser gives its own typed refusal or a value within its bounds, nothing
else; the memory that it holds meanwhile is bounded; after a refusal it stays in error where the contract says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from base64 import b64encode
from collections.abc import Callable, Coroutine
from typing import Any

import h11

from egress.dns import Ede, Question, Rcode, answer_error, parse_question
from egress.hello import ClientHello, HelloReader, NotTls
from egress.http import MAX_WAITING_BYTES, HttpGuard, looks_like_http
from egress.policy import canonical_name
from egress.preview import Site, VisitRefused, answer_outside
from egress.proxy import BadProxyRequest, ProxyReader, refusal
from egress.substitution import SecretGuard
from nsinit.wire import protocol as nsinit_protocol
from nsinit.wire import validate
from runner.wire import protocol as runner_protocol
from runner.wire.codec import ProtocolError
from runner.wire.protocol import (
    FROM_DAEMON,
    FROM_RUNNER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    FrameDecoder,
    Kind,
)
from sandkasten.admission.keys import KeyRing
from sandkasten.api.e2b import connect, filesystem, process
from sandkasten.api.examples import EXAMPLES
from sandkasten.api.http.auth import Gate
from sandkasten.api.http.errors import error_answer
from sandkasten.api.http.exchange import parse_query
from sandkasten.api.http.json import check_value_count, decode_object
from sandkasten.api.http.routing import parse_target
from sandkasten.api.http.settings import ApiSettings
from sandkasten.api.resources import fields, files, runs, sessions
from sandkasten.api.websocket import exec_messages, terminal_messages
from sandkasten.api.websocket.messages import MessageRefused
from sandkasten.building.dockerfile import BuildError, read_dockerfile
from sandkasten.building.ignoring import Ignored
from sandkasten.building.words import expand
from sandkasten.errors import InvalidRequest, PermissionDenied, RunnerProtocolError, SandkastenError, Unauthorized
from sandkasten.links.runner import decode_answer
from sandkasten.model import Limits
from tests.fuzz import grammar
from tests.fuzz.grammar import Choices

MAX_NUMBER = 2**53
MAX_TEXT_CHARS = 8 * 1024
_CARRIERS = (Kind.STARTED, Kind.REPLY, Kind.ERROR, Kind.EVENT)
_SETTINGS = ApiSettings(api_key="sk-test-key")


ANSWERS = runner_protocol.ANSWERS.classes
_RUNNER_REQUESTS = runner_protocol.REQUESTS.classes
_NSINIT_REQUESTS = nsinit_protocol.REQUESTS.classes
_NSINIT_ANSWERS = nsinit_protocol.ANSWERS.classes


# The daemon and a hostile runner -----------------------------------------------------------------------------------


def runner_stream(choices: Choices) -> bytes:
    """Return what a hostile runner may write: frames of its grammar, spoiled inside and as a whole."""
    stream = b""
    for _ in range(1 + choices.number(4)):
        kind = choices.pick(sorted(FROM_RUNNER)) if choices.number(8) else choices.pick(sorted(FROM_DAEMON))
        body = choices.blob(64)
        if kind in _CARRIERS:
            body = grammar.spoiled_json(choices, grammar.message(choices, ANSWERS))
        length = len(body) if choices.number(12) else choices.number(2**32)
        stream += runner_protocol.encode_header(kind, length) + body
    return grammar.damage(choices, stream) if choices.one_in(6) else stream


def runner_frames(data: bytes) -> None:
    """`FrameDecoder` and `decode_answer`, as `runner_link` uses them."""
    choices = Choices(data)
    stream, decoder = runner_stream(choices), FrameDecoder(FROM_RUNNER, max_body_bytes=MAX_FRAME_BYTES)
    try:
        for piece in grammar.cut(choices, stream):
            decoder.feed(piece)
            for kind, body in decoder:
                assert kind in FROM_RUNNER
                assert len(body) <= MAX_FRAME_BYTES
                if kind in _CARRIERS:
                    _check_answer(kind, body)
            assert decoder.buffered_bytes < MAX_FRAME_BYTES + HEADER_BYTES
    except ProtocolError:
        assert decoder.buffered_bytes == 0
        _must_raise(ProtocolError, lambda: decoder.feed(b"x"))
        _must_raise(ProtocolError, lambda: next(decoder))


def _check_answer(kind: Kind, body: bytes) -> None:
    try:
        answer = decode_answer(kind, body)
    except RunnerProtocolError:
        return
    assert isinstance(answer, runner_protocol.Error) is (kind is Kind.ERROR)
    _check_bounds({name: getattr(answer, name) for name in answer.__dataclass_fields__})


def _check_bounds(value: Any) -> None:
    match value:
        case dict():
            for each in value.values():
                _check_bounds(each)
        case tuple():
            for each in value:
                is_message = dataclasses.is_dataclass(each)
                _check_bounds({name: getattr(each, name) for name in each.__dataclass_fields__} if is_message else each)
        case str():
            assert len(value.encode("utf-8", "surrogateescape")) <= MAX_TEXT_CHARS
        case int():
            assert abs(value) <= MAX_NUMBER


# The runner, nsinit and a hostile daemon ---------------------------------------------------------------------------


def runner_requests(data: bytes) -> None:
    """Requests that PID 1 takes from its connection: frames, then exactly a request."""
    choices = Choices(data)
    body = grammar.spoiled_json(choices, grammar.message(choices, _RUNNER_REQUESTS))
    stream = runner_protocol.encode_frame(choices.pick(sorted(Kind)), body) + choices.blob(32)
    decoder = FrameDecoder(FROM_DAEMON, max_body_bytes=MAX_REQUEST_BYTES)
    try:
        for piece in grammar.cut(choices, stream):
            decoder.feed(piece)
            for kind, each in decoder:
                if kind is Kind.REQUEST:
                    assert type(runner_protocol.REQUESTS.decode(each)) in _RUNNER_REQUESTS
    except ProtocolError:
        pass


def nsinit_requests(data: bytes) -> None:
    """A request that decodes and passes `validate` holds names that are one harmless component, and sane numbers."""
    choices = Choices(data)
    body = grammar.spoiled_json(choices, grammar.message(choices, _NSINIT_REQUESTS))
    try:
        request = nsinit_protocol.REQUESTS.decode(body)
    except ProtocolError:
        return
    for check, field in _CHECKS:
        given = getattr(request, field, None)
        if given is not None:
            _check_valid(check, given)


def _check_valid(check: Callable[[Any], None], given: Any) -> None:
    try:
        check(given)
    except validate.InvalidName:
        return
    match given:
        case nsinit_protocol.SandboxPlan():
            names = [given.session_id, given.image, *([given.workspace_id] if given.workspace_id is not None else [])]
            _check_limits(given.limits)
        case nsinit_protocol.Limits():
            names = []
            _check_limits(given)
        case "" if check is validate.check_digest:  # of an archive whose digest nobody knows yet
            names = []
        case _:
            names = [given]
    assert not any("/" in name or "\0" in name or name in ("", ".", "..") for name in names), names


def _check_limits(limits: nsinit_protocol.Limits) -> None:
    assert 0 < limits.memory_bytes < 2**63
    assert 0 < limits.pids < 2**31
    assert 0 < limits.cpu_quota_us < 2**63
    assert 0 < limits.cpu_period_us <= 1_000_000


_CHECKS: tuple[tuple[Callable[[Any], None], str], ...] = (
    (validate.check_session_id, "session_id"),
    (validate.check_workspace_id, "workspace_id"),
    (validate.check_run_cgroup_name, "name"),
    (validate.check_node_id, "node_id"),
    (validate.check_digest, "digest"),
    (validate.check_image_name, "name"),
    (validate.check_limits, "limits"),
    (validate.check_plan, "plan"),
)


def nsinit_answers(data: bytes) -> None:
    """Answers that the daemon takes from nsinit."""
    choices = Choices(data)
    try:
        nsinit_protocol.ANSWERS.decode(grammar.spoiled_json(choices, grammar.message(choices, _NSINIT_ANSWERS)))
    except ProtocolError:
        pass


# The API and a hostile client --------------------------------------------------------------------------------------

BODIES = tuple((cls, dict(each)) for cls, examples in EXAMPLES.items() for each in examples)
_E2B: tuple[tuple[type, dict[str, Any]], ...] = (
    (process.StartMessage, {"process": {"cmd": "sh", "args": ["-c", "x"], "envs": {"A": "b"}, "cwd": "/"}, "tag": "t"}),
    (process.StartMessage, {"process": {"cmd": "sh"}, "pty": {"size": {"cols": 80, "rows": 24}}, "stdin": False}),
    (process.InputMessage, {"process": {"pid": 1}, "input": {"stdin": "eA=="}}),
    (process.InputStreamMessage, {"data": {"input": {"pty": "eA"}}}),
    (process.SignalMessage, {"process": {"tag": "t"}, "signal": "SIGNAL_SIGKILL"}),
    (filesystem.ListMessage, {"path": "/", "depth": 3}),
    (filesystem.MoveMessage, {"source": "a", "destination": "b"}),
    (filesystem.WatcherMessage, {"watcherId": "w"}),
)


def _to_model(request: object) -> object:
    match request:
        case sessions.CreateRequest():
            return request.to_spec(default_limits=Limits(), key_header=None)
        case sessions.PatchRequest():
            return request.to_patch(current=Limits())
        case runs.ExecRequest() | runs.ProcessRequest():
            return request.to_spec(_SETTINGS)
        case files.WriteRequest() | runs.StdinRequest():
            return request.content
        case runs.ShellRequest():
            return request.to_spec()
        case runs.WaitRequest():
            return request.to_condition()
    return request


def api_bodies(data: bytes) -> None:
    """Bodies of requests: their bytes become the model's value or a refusal that can be sent as it is."""
    choices = Choices(data)
    cls, body = choices.pick(BODIES)
    text = grammar.spoiled_json(choices, body)
    try:
        _run_at_once(check_value_count(text))
        _to_model(fields.parse(decode_object(text), cls))
    except SandkastenError as error:
        _check_refusal(error)


def _run_at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run what has no reason to wait, with a body as small as these."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


def _check_refusal(error: SandkastenError) -> None:
    """Check that a refusal is a client error whose answer is JSON and no longer than a screen or two."""
    answer = error_answer(error)
    assert 400 <= answer.status < 500, error
    json.loads(answer.body)
    assert len(answer.body) < 64 * 1024


def api_requests(data: bytes) -> None:
    """Targets, queries, headers and file names of requests."""
    choices = Choices(data)
    path = choices.pick(
        (b"/v1/sessions", b"/v1/sessions/0123456789abcdef/execs/e1/output", b"/healthz", b"//a/%2e%2e/b")
    )
    target = parse_target(grammar.damage(choices, path), host=choices.pick((None, "localhost", "\xff")))
    assert target is None or all(isinstance(segment, str) for segment in target.segments)
    query = choices.pick((b"status=all&limit=5", b"cols=80&rows=24&read_only=true&window=9", b"a=%ff&b=%00", b"&&==&%"))
    try:
        parsed = parse_query(grammar.damage(choices, query) if choices.number(4) else query)
        terminal_messages.parse_query(parsed).to_spec()
    except InvalidRequest as error:
        _check_refusal(error)
    headers = [
        (name, grammar.damage(choices, value) if choices.number(2) else value)
        for name, value in (
            (b"host", b"localhost"),
            (b"authorization", b"Bearer sk-test-key"),
            (b"origin", b"http://a"),
        )
        for _ in range(choices.number(3))
    ]
    for gate, has_right in ((Gate("sk-test-key", KeyRing()), _has_key(headers)), (Gate(None, KeyRing()), True)):
        try:
            gate.check({"headers": headers, "server": ("127.0.0.1", 1)})
            gate.check_origin({"headers": headers}, allowed=("http://a",))
        except (PermissionDenied, Unauthorized) as error:
            _check_refusal(error)
        else:
            assert has_right, headers
    try:
        name = files.safe_name(grammar.damage(choices, b"a/b.txt").decode("utf-8", "surrogateescape"))
        assert not {"/", "\0"} & set(name)
        assert name not in ("", ".", "..")
    except InvalidRequest as error:
        _check_refusal(error)


def _has_key(headers: list[tuple[bytes, bytes]]) -> bool:
    values = [value for name, value in headers if name == b"authorization"]
    return len(values) == 1 and values[0].partition(b" ")[2].strip() == b"sk-test-key"


_CONTROLS: tuple[dict[str, Any], ...] = (
    {"type": "start", "id": 1, "credit": 65536, "max_frame": 4096, **EXAMPLES[runs.ExecRequest][1]},
    {"type": "attach", "id": 2, "exec_id": "e1", "after": 3, "credit": 65536},
    {"type": "credit", "id": 1, "bytes": 1000},
    {"type": "signal", "id": 1, "signal": "INT"},
    {"type": "resize", "id": 1, "cols": 80, "rows": 24},
    {"type": "cancel", "id": 1},
    {"type": "ping", "text": "x"},
    {"type": "take_over"},
)


def websocket_messages(data: bytes) -> None:
    """Text and binary messages of exec and terminal sockets."""
    choices = Choices(data)
    text = grammar.spoiled_json(choices, choices.pick(_CONTROLS)).decode("utf-8", "replace")
    header = exec_messages.HEADER.pack(choices.number(2**32), choices.number(256), choices.number(2**64))
    binary = grammar.damage(choices, header + choices.blob(32)) if choices.one_in(3) else header + choices.blob(32)
    for parse in (
        lambda: exec_messages.parse_message(text),
        lambda: exec_messages.parse_message(binary),
        lambda: terminal_messages.parse_message(text),
    ):
        try:
            parse()
        except MessageRefused as refused:
            _check_refusal(refused.error)


# The way out, a hostile session and a hostile server ------------------------------------------------------------------

_QUERY = bytes.fromhex("beef01000001000000000001076578616d706c65036f726700000100010000291000000000000000")
_HELLO = bytes.fromhex(
    f"16030100430100003f0303{'00' * 33}00021301010000140000001000"  # one cipher suite, then extensions
    "0e00000b6578616d706c652e6f7267"
)
_HTTP_PIECES = (
    *(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", b"POST / HTTP/1.1\r\nHost: example.org\r\n", b"\r\n", b"\n"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"hello", b" x"),
    *(b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 101 x\r\n", b"Host: a\r\n"),
    *(b"HTTP/1.0 204 x\r\n\r\n", b"", b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n"),
)


def egress_dns(data: bytes) -> None:
    """Questions that a session sends, spoiled; the answer to each is small and has its id."""
    choices = Choices(data)
    message = grammar.damage(choices, _QUERY) if choices.number(4) else choices.blob(600)
    result = parse_question(message)
    if isinstance(result, Question):
        assert result.name == (result.name and canonical_name(result.name))
        result = answer_error(result, Rcode.NXDOMAIN, ede=Ede.FILTERED, text=result.name * 9)
    assert result is None or (result[:2] == message[:2] and result[2] & 0x80 and len(result) <= 512)


def egress_hello(data: bytes) -> None:
    """First bytes of a connection, in pieces: the result is that of all bytes at once, and stays."""
    choices = Choices(data)
    hello = grammar.damage(choices, _HELLO) if choices.number(4) else choices.blob(600)
    reader, whole = HelloReader(), HelloReader().feed(hello)
    results = [reader.feed(piece) for piece in grammar.cut(choices, hello)] or [None]
    assert results[-1] == whole
    found = [each for each in results if each is not None]
    assert found == [whole] * len(found)
    if isinstance(whole, ClientHello):
        assert (whole.server_name is None) is (whole.fault is not None)
        assert whole.server_name is None or whole.server_name == canonical_name(whole.server_name)
    assert whole is None or isinstance(whole, ClientHello | NotTls)


def egress_http(data: bytes) -> None:
    """Bytes of a client and of a server in turn: nothing follows an end, and what is held is bounded."""
    choices = Choices(data)
    guard, is_over = HttpGuard("example.org", 80, is_proxy=choices.one_in(3)), False
    while not choices.is_over:
        piece = choices.pick(_HTTP_PIECES) if choices.number(4) else choices.blob(40)
        piece = grammar.damage(choices, piece) if choices.one_in(6) else piece
        looks_like_http(piece)
        step = guard.from_server(piece) if choices.one_in(3) else guard.from_client(piece)
        assert not is_over or not (step.to_server or step.to_client)
        assert step.refused is None or (step.is_over and not step.wants_raw)
        is_over = step.is_over
        assert len(guard._client.trailing_data[0]) <= MAX_WAITING_BYTES or is_over or step.wants_raw


_VALUE, _PLACEHOLDER = b"value-that-nobody-sees", b"placeholder-of-it"
_SECRET_PIECES = (
    *(b"X-Key: %s\r\n" % _PLACEHOLDER, b"Authorization: Bearer %s\r\n" % _PLACEHOLDER, b"Host: %s\r\n" % _PLACEHOLDER),
    *(b"Authorization: Basic %s\r\n" % b64encode(b"me:" + _PLACEHOLDER), b"Authorization: Basic =\r\n"),
    *(b"GET /%s HTTP/1.1\r\nHost: example.org\r\n\r\n" % _PLACEHOLDER, b"11\r\n%s\r\n" % _PLACEHOLDER, _PLACEHOLDER),
)
_SECRET_REQUESTS = tuple(
    b"%s\r\nHost: example.org\r\n%s\r\n" % (start, field)
    for start in (b"GET / HTTP/1.1", b"POST / HTTP/1.1\r\nContent-Length: 3", b"GET / HTTP/1.1\r\nUpgrade: websocket")
    for field in (_SECRET_PIECES[0], _SECRET_PIECES[3])
)
_ANSWER_PIECES = (
    *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 101 OK\r\n", b"HTTP/1.1 100 OK\r\n", b"HTTP/1.0 404 "),
    *(b"\r\n", b"\r\n", b"Content-Length: 44\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n", b"16\r\n", b"x"),
)
_ECHOES = (_VALUE, _VALUE[:9], _VALUE[9:], b64encode(b"me:" + _VALUE), b"16\r\n%s\r\n" % _VALUE, b"X: %s\r\n" % _VALUE)


def egress_secrets(data: bytes) -> None:
    """As `egress_http`, with a secret: the value goes to the server in a field and nowhere else, and never back."""
    choices = Choices(data)
    guard = SecretGuard("example.org", 80, {_PLACEHOLDER: _VALUE})
    up, down = guard.from_client(choices.pick(_SECRET_REQUESTS)).to_server, b""
    is_server = True
    while not choices.is_over:
        own = _ECHOES if is_server else _SECRET_PIECES
        usual = _ANSWER_PIECES if is_server else _HTTP_PIECES
        piece = choices.pick(own) if choices.one_in(3) else choices.pick(usual)
        piece = grammar.damage(choices, piece) if choices.one_in(9) else piece
        step = guard.from_server(piece) if is_server else guard.from_client(piece)
        up, down = up + step.to_server, down + step.to_client
        if step.is_over:
            break
        is_server = not choices.one_in(4)
    assert all(b": " in line.partition(_VALUE)[0] for line in up.split(b"\n") if _VALUE in line), up
    assert not any(each in down for each in (_VALUE, b64encode(b"me:" + _VALUE)) if each in up), down


def egress_proxy(data: bytes) -> None:
    """First bytes to the proxy, in pieces: a request that names its host, or a refusal of one line."""
    choices = Choices(data)
    stream = b"".join(grammar.damage(choices, each) if choices.one_in(4) else each for each in _proxy_pieces(choices))
    reader, request = ProxyReader(), None
    try:
        for piece in grammar.cut(choices, stream):
            if request := reader.feed(piece):
                break
    except BadProxyRequest as bad:
        head = refusal(bad.reason, str(bad)).partition(b"\r\n\r\n")[0]
        assert len(head.split(b"\r\n")) == len(head.splitlines()) == 4
        return
    if request:
        assert 0 < request.port < 65536
        assert not isinstance(request.host, str) or request.host == canonical_name(request.host)
        assert stream.startswith(request.rest) or request.is_tunnel
        if not request.is_tunnel:
            step = HttpGuard(str(request.host), request.port, is_proxy=True).from_client(request.rest)
            assert not step.to_server or b"://" not in step.to_server.split(b" ")[1]


def _proxy_pieces(choices: Choices) -> list[bytes]:
    host = choices.pick((b"example.org", b"[2001:db8::1]", b"[::ffff:127.0.0.1]", b"0x7f.1", b"a@b", b"", b"10.0.0.1"))
    port = choices.pick((b":443", b":80", b"", b":0", b":99999"))
    line = choices.pick((b"CONNECT %s%s HTTP/1.%d\r\n", b"GET http://%s%s/a?b HTTP/1.%d\r\n"))
    line %= (host, port, choices.number(2))
    return [line, b"Host: %s%s\r\n" % (host, port), *(choices.pick(_HTTP_PIECES[1:]) for _ in range(choices.number(4)))]


def _must_raise(expected: type[Exception], action: Callable[[], object]) -> None:
    try:
        action()
    except expected:
        return
    raise AssertionError(f"no {expected.__name__} after one")


# The preview gateway between hostile clients and hostile servers ---------------------------------------------------

_PREVIEW = "8000-0123456789abcdef.localhost"
_TOKEN = "token-of-this-fuzzing"
_PREVIEW_LINES = (
    *(f"Host: {_PREVIEW}", f"host: {_PREVIEW}:80", "Host: 80-x.localhost", "Connection: host, content-length, x"),
    *(f"Cookie: _sandkasten_preview={_TOKEN}; a=1", f'COOKIE: a="; _sandkasten_preview={_TOKEN}', f"Cookie: {_TOKEN}"),
    *(f"X-Sandkasten-Preview-Token: {_TOKEN}", f"x-sandkasten-preview-token:{_TOKEN}", "Origin: null", "X-Real-IP: 1"),
    *("Content-Length: 3", "Content-Length: 3, 3", "Transfer-Encoding: chunked", "Transfer-Encoding : chunked"),
    *("Upgrade: websocket", "Connection: Upgrade", "Upgrade: h2c", "X-Forwarded-For: 9.9.9.9", "X: a\r\n folded"),
    *("Set-Cookie: a=1; Domain=localhost", "Set-Cookie: b=2", "set-cookie: _sandkasten_preview=x", "TE: trailers"),
    *("Set-Cookie: =_sandkasten_preview=x", "Set-Cookie: a _sandkasten_preview=x"),
)
_PREVIEW_STARTS = (
    *(f"GET /?a=1&_sandkasten_token={_TOKEN} HTTP/1.1", "GET / HTTP/1.1", "POST /a?b HTTP/1.1", "HEAD * HTTP/1.0"),
    *("CONNECT a:1 HTTP/1.1", "GET http://a/ HTTP/1.1", "HTTP/1.1 200 OK", "HTTP/1.1 101 Switching", "HTTP/1.0 304 "),
)


def preview_http(data: bytes) -> None:
    """A request to a preview, and an answer from one: another reader sees the same single message, without a token and
    without a cookie for other names."""
    choices = Choices(data)
    lines = [choices.pick(_PREVIEW_STARTS), *(choices.pick(_PREVIEW_LINES) for _ in range(choices.number(9)))]
    head = "\r\n".join([*lines, "", ""]).encode()
    head = grammar.damage(choices, head) if choices.one_in(4) else head
    role = h11.CLIENT if head.startswith(b"HTTP") else h11.SERVER
    reader = h11.Connection(role)
    if role is h11.CLIENT:
        reader.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        reader.send(h11.EndOfMessage())
    try:
        reader.receive_data(head)
        event = reader.next_event()
        if isinstance(event, h11.Request):
            event = Site().read(event, "127.0.0.1").request
        elif isinstance(event, h11.Response | h11.InformationalResponse):
            event = answer_outside(event)
    except (h11.RemoteProtocolError, VisitRefused):
        return
    if isinstance(event, h11.Request):
        _check_visit(event)
    elif isinstance(event, h11.Response):
        cookies = [value.lower().split(b";") for name, value in event.headers if name == b"set-cookie"]
        attributes = [each.partition(b"=")[0].strip() for _, *rest in cookies for each in rest]
        assert b"domain" not in attributes, cookies
        assert not any(b"sandkasten_preview" in pair for pair, *_ in cookies), cookies


def _check_visit(request: h11.Request) -> None:
    try:
        sent = h11.Connection(h11.CLIENT).send(request)
    except h11.LocalProtocolError:
        return  # the gateway ends the connection
    server = h11.Connection(h11.SERVER)
    server.receive_data(sent)
    seen = server.next_event()
    assert isinstance(seen, h11.Request)
    assert (seen.method, seen.target, sorted(seen.headers)) == (request.method, request.target, sorted(request.headers))
    assert server.trailing_data[0] == b""
    names = [name for name, _ in seen.headers]
    assert names.count(b"host") == 1
    assert not (b"content-length" in names and b"transfer-encoding" in names)
    assert b"x-sandkasten-preview-token" not in names
    assert b"_sandkasten_token=" not in seen.target
    cookies = [pair.strip() for name, value in seen.headers if name == b"cookie" for pair in value.split(b";")]
    assert not any(each.startswith(b"_sandkasten_preview=") for each in cookies), cookies
    assert dict(seen.headers)[b"x-forwarded-for"] == b"127.0.0.1"


def e2b_streams(data: bytes) -> None:
    """A client's stream of E2B's: messages within bounds, whatever the pieces, and requests of each service."""
    choices = Choices(data)
    stream = b""
    for _ in range(1 + choices.number(4)):
        body = grammar.spoiled_json(choices, choices.pick(_E2B)[1])
        flags = 0 if choices.number(6) else choices.number(256)
        size = len(body) if choices.number(8) else choices.number(2**32)
        stream += connect.HEAD.pack(flags, size) + body
    reader = connect.EnvelopeReader(MAX_TEXT_CHARS)
    refused: SandkastenError | None = None
    try:
        for piece in grammar.cut(choices, stream):
            for body in reader.feed(piece):
                connect.read_message(connect.decode_message(body), choices.pick(_E2B)[0])
        reader.finish()
    except SandkastenError as error:
        refused = error
    assert refused is None or error_answer(refused).status in (400, 413)


_LINES = (b"FROM a", b"RUN x", b"COPY a b", b"ENV", b"A=$B", b"${", b"}", b":-", b"<<E", b"E", b"[", b"#")
_SIGNS = (b"\\", b"'", b'"', b"\n", b" ", b"**/", b"!", b"[^")


def dockerfiles(data: bytes) -> None:
    """A stranger's Dockerfile, and its patterns: instructions whose lines there are, or a refusal by the line."""
    choices = Choices(data)
    text = b"FROM a\n"
    for _ in range(choices.number(64)):
        text += choices.pick((choices.pick(_LINES), choices.pick(_SIGNS), bytes([choices.number(256)]), b"\n"))
    told = "D:"
    try:
        file = read_dockerfile(text, "D")
    except BuildError as error:
        told = str(error)
    else:
        for each in (line for stage in file.stages for line in (stage.start, *stage.steps)):
            assert 1 <= each.line <= text.count(b"\n") + 1
            with contextlib.suppress(ValueError):
                assert len(expand(each.text, {"A": "1"}.get, file.escape)) <= len(text)
    assert told.startswith("D:"), told
    with contextlib.suppress(ValueError):
        assert Ignored(text)("a/b") in (True, False)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        *(runner_frames, runner_requests, nsinit_requests, nsinit_answers),
        *(api_bodies, api_requests, websocket_messages),
        *(e2b_streams, dockerfiles),
        *(egress_dns, egress_hello, egress_http, egress_secrets, egress_proxy, preview_http),
    )
}
