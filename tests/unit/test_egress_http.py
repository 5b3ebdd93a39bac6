"""HTTP of a way out: Host on every request, one reading of each message on both sides, and hostile bytes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egress.http import MAX_FEED_BYTES, MAX_WAITING_BYTES, HttpGuard, Step, looks_like_http, refusal
from egress.policy import Reason

GET = b"GET /a HTTP/1.1\r\nHost: example.org\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
WEBSOCKET = b"GET / HTTP/1.1\r\nHost: example.org\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n"
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


def guard(name: str = "example.org", port: int = 80) -> HttpGuard:
    return HttpGuard(name, port)


def request(*headers: bytes, line: bytes = b"GET / HTTP/1.1", body: bytes = b"") -> bytes:
    return b"\r\n".join([line, *headers, b"", b""]) + body


def post(*headers: bytes, body: bytes = b"") -> bytes:
    return request(b"Host: example.org", *headers, line=b"POST / HTTP/1.1", body=body)


def bytewise(data: bytes) -> Iterator[bytes]:
    return (bytes([byte]) for byte in data)


def summed(steps: Iterable[Step]) -> tuple[bytes, bytes, Step]:
    """Return all bytes to the server, all to the client, and the last step; nothing is sent after the end."""
    to_server, to_client, last = b"", b"", Step()
    for step in steps:
        assert not last.is_over or (step.to_server, step.to_client, step.is_over) == (b"", b"", True)
        to_server, to_client = to_server + step.to_server, to_client + step.to_client
        last = step if not last.is_over else last
    return to_server, to_client, last


def refused(step: Step, reason: Reason, status: int, text: str = "") -> None:
    """Check that a step refuses: nothing goes to the server, and the client is told why, in JSON."""
    assert (step.to_server, step.is_over, step.refused, step.wants_raw) == (b"", True, reason, False)
    head, _, body = step.to_client.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    error = json.loads(body)
    assert error["error_code"] == "EGRESS_DENIED"
    assert text in error["message"]


def read_requests(data: bytes) -> list[tuple[bytes, list[bytes], bytes]]:
    """Read requests as the strictest server would: line, header lines and body of each; a rest that is incomplete
    is left.
    """
    found = []
    while b"\r\n\r\n" in data:
        head, _, data = data.partition(b"\r\n\r\n")
        line, *headers = head.split(b"\r\n")
        assert re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [\x21-\x7e]+ HTTP/1\.1", line), line
        assert all(re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[^\r\n\0]*", each) for each in headers), headers
        fields = [(name.lower(), value.strip()) for name, _, value in (each.partition(b":") for each in headers)]
        lengths = [value for name, value in fields if name == b"content-length"]
        codings = [value for name, value in fields if name == b"transfer-encoding"]
        assert len(lengths) + len(codings) <= 1
        body = b""
        if codings:
            assert codings == [b"chunked"]
            while match := re.match(rb"([0-9a-f]+)\r\n", data):
                size = int(match[1], 16)
                chunk, data = data[match.end() : match.end() + size], data[match.end() + size :]
                if not size:
                    data = data.partition(b"\r\n\r\n")[2] if not data.startswith(b"\r\n") else data[2:]
                    break
                assert data[:2] in (b"", b"\r", b"\r\n")
                body, data = body + chunk, data[2:]
        elif lengths:
            size = int(lengths[0])
            body, data = data[:size], data[size:]
        found.append((line, headers, body))
    return found


def test_requests_pass_one_after_the_other() -> None:
    """A connection is kept open, and names of headers keep their case."""
    pair = guard()
    for _ in range(3):
        assert pair.from_client(GET) == Step(to_server=GET)
        assert pair.from_server(OK) == Step(to_client=OK)
    assert pair.from_client(b"") == Step(is_over=True)


@pytest.mark.parametrize(
    ("host", "name", "port"),
    [
        (b"example.org", "example.org", 80),
        (b"EXAMPLE.org.", "example.org", 80),
        (b"example.org:8080", "example.org", 8080),
        (b"host1", "host1", 80),
        (b"192.0.2.1:81", "192.0.2.1", 81),
        (b"[2001:DB8::1]", "2001:db8::1", 80),
    ],
)
def test_the_host_may_be_written_in_several_ways(host: bytes, name: str, port: int) -> None:
    """All of them name the server; a port is that of the connection."""
    data = request(b"host: " + host)
    assert guard(name, port).from_client(data) == Step(to_server=data)


BAD_HOSTS = (
    *(b"evil.org", b"", b"a.example.org", b"example.org.evil.org", b"example.org:81", b"example.org:"),
    *(b"example.org, evil.org", b"user@example.org", b"example.org/", b"example.org:80:80", b"[example.org]"),
    *(b"example.org:080", b"ex ample"),
    *(b"127.0.0.1", b"[::1]", b"example.org\tevil.org", b"example.org..", b"ex%61mple.org", b"http://example.org"),
)  # fmt: skip


@pytest.mark.parametrize("host", BAD_HOSTS)
@pytest.mark.parametrize("before", [b"", GET])
def test_another_host_is_refused_on_every_request(host: bytes, before: bytes) -> None:
    """On the first, and on the second of a connection."""
    pair = guard()
    if before:
        pair.from_client(before)
        pair.from_server(OK)
    refused(pair.from_client(request(b"Host: " + host)), Reason.HOST, 403, "example.org")
    assert pair.from_client(GET) == Step(is_over=True)
    assert pair.from_server(OK) == Step(is_over=True)


def test_another_host_in_a_request_that_waited_is_refused() -> None:
    """The client has the answer to the first one, and then the refusal."""
    pair = guard()
    step = pair.from_client(GET + request(b"Host: evil.org"))
    assert (step.to_server, step.is_over, step.is_client_waiting) == (GET, False, True)
    step = pair.from_server(OK)
    assert step.to_client.startswith(OK + b"HTTP/1.1 403 ")
    assert (step.to_server, step.is_over, step.refused) == (b"", True, Reason.HOST)


@pytest.mark.parametrize(
    ("data", "reason", "status"),
    [
        (request(), Reason.BAD_HTTP, 400),
        (request(line=b"GET / HTTP/1.0"), Reason.HOST, 403),
        (request(b"Host: example.org", b"Host: example.org"), Reason.BAD_HTTP, 400),
        (request(b"Host: example.org", b"hOST: evil.org", line=b"GET / HTTP/1.0"), Reason.BAD_HTTP, 400),
        (request(b"Host:", b" evil.org"), Reason.HOST, 403),
        (request(b"Host: example.org", b" evil.org"), Reason.HOST, 403),
        (request(b"Host : example.org"), Reason.BAD_HTTP, 400),
        (request(b" Host: example.org"), Reason.BAD_HTTP, 400),
        (request(b"Host: example.org", line=b"GET http://evil.org/ HTTP/1.1"), Reason.BAD_HTTP, 403),
        (request(b"Host: example.org", line=b"GET http://example.org/ HTTP/1.1"), Reason.BAD_HTTP, 403),
        (request(b"Host: example.org", line=b"GET * HTTP/1.1"), Reason.BAD_HTTP, 403),
        (request(b"Host: example.org", line=b"CONNECT example.org:80 HTTP/1.1"), Reason.BAD_HTTP, 403),
        (request(b"Host: example.org", line=b"CONNECT / HTTP/1.1"), Reason.BAD_HTTP, 403),
        (request(b"Host: example.org", line=b"GET / HTTP/2.0"), Reason.BAD_HTTP, 400),
        (request(b"Host: example.org", line=b"GET / HTTP/0.9"), Reason.BAD_HTTP, 400),
        (request(b"Host: example.org", line=b"GET /a b HTTP/1.1"), Reason.BAD_HTTP, 400),
        (b"GET /\r\n\r\n", Reason.BAD_HTTP, 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Reason.BAD_HTTP, 400),
        (b"\r\n" + GET, Reason.BAD_HTTP, 400),
        (b"\x16\3\1\0\0\r\n\r\n", Reason.BAD_HTTP, 400),
        (post(b"Content-Length: 5", b"Transfer-Encoding: chunked"), Reason.BAD_HTTP, 400),
        (post(b"Transfer-Encoding: chunked", b"content-length: 0"), Reason.BAD_HTTP, 400),
        (post(b"Transfer-Encoding: gzip, chunked"), Reason.BAD_HTTP, 501),
        (post(b"Transfer-Encoding: identity"), Reason.BAD_HTTP, 501),
        (post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), Reason.BAD_HTTP, 501),
        (post(b"Transfer-Encoding: \x0bchunked"), Reason.BAD_HTTP, 400),
        (post(b"Content-Length: 5", b"Content-Length: 6"), Reason.BAD_HTTP, 400),
        (post(b"Content-Length: +5"), Reason.BAD_HTTP, 400),
        (post(b"Content-Length: 0x5"), Reason.BAD_HTTP, 400),
        (request(b"Host: example.org", b"X: a\0b"), Reason.BAD_HTTP, 400),
        (
            request(b"Host: example.org", b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0"),
            Reason.BAD_HTTP,
            400,
        ),
        (request(b"Host: example.org", b"X: " + b"x" * 70_000)[:-2], Reason.BAD_HTTP, 400),
    ],
)
def test_what_two_readers_may_read_in_two_ways_is_refused(data: bytes, reason: Reason, status: int) -> None:
    """Before a byte of the request is sent on; cut anywhere as well."""
    step = guard().from_client(data)
    refused(step, reason, status if status != 501 else 400)
    if len(data) < 1000:
        cut = guard()
        to_server, to_client, last = summed(cut.from_client(byte) for byte in bytewise(data))
        assert (to_server, last.refused) == (b"", reason)
        assert to_client[:12] == step.to_client[:12]


def test_folded_lines_and_bare_ends_of_lines_are_written_in_one_form() -> None:
    """The server gets no fold, and no line that ends in another way."""
    step = guard().from_client(b"GET / HTTP/1.1\nHost: example.org\r\nX: a\r\n\t b\n\n")
    assert step == Step(to_server=b"GET / HTTP/1.1\r\nHost: example.org\r\nX: a b\r\n\r\n")
    step = guard().from_client(post(b"Content-Length: 2, 2", b"Content-Length: 2", body=b"hi"))
    assert step == Step(to_server=post(b"Content-Length: 2", body=b"hi"))


def test_a_refusal_of_head_has_no_body() -> None:
    """The length is there all the same."""
    step = guard().from_client(request(b"Host: evil.org", line=b"HEAD / HTTP/1.1"))
    assert step.to_client.endswith(b"\r\n\r\n")
    assert refusal(403, "x").startswith(refusal(403, "x", has_body=False))


@pytest.mark.parametrize("is_cut", [False, True])
def test_chunks_pass_in_both_directions(is_cut: bool) -> None:
    """Without their extensions; trailers go on."""
    pair = guard()
    data = post(b"Transfer-Encoding: chunked", body=b"3;a=b\r\nabc\r\n0010\r\n0123456789abcdef\r\n0\r\nX: y\r\n\r\n")
    to_server, _, last = summed(pair.from_client(piece) for piece in (bytewise(data) if is_cut else [data]))
    assert [body for _, _, body in read_requests(to_server)] == [b"abc0123456789abcdef"]
    assert to_server.endswith(b"\r\n0\r\nX: y\r\n\r\n")
    assert not last.is_over
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    _, to_client, last = summed(pair.from_server(piece) for piece in (bytewise(data) if is_cut else [data]))
    assert re.sub(rb"1\r\nh\r\n1\r\ni", b"2\r\nhi", to_client) == data
    assert not last.is_over
    assert pair.from_client(GET).to_server == GET


def test_a_trailer_with_a_field_of_the_head_is_refused() -> None:
    """Some servers merge the two."""
    pair = guard()
    step = pair.from_client(post(b"Transfer-Encoding: chunked", body=b"0\r\nHost: evil.org\r\n\r\n"))
    assert (step.refused, step.is_over, b"evil" in step.to_server) == (Reason.BAD_HTTP, True, False)


@pytest.mark.parametrize(
    "body", [b"3\r\nabcX", b"-1\r\n", b"x\r\n", b"3 \r\nab", b"0x3\r\nabc\r\n", b"3\nabc\n0\n\n", b"f" * 30 + b"\r\n"]
)
def test_broken_chunks_end_the_connection(body: bytes) -> None:
    """Nothing behind them is read as a request."""
    pair = guard()
    steps = [pair.from_client(post(b"Transfer-Encoding: chunked", body=body)), pair.from_client(b"\r\n\r\n" + GET)]
    to_server, _, last = summed(steps)
    assert b"GET" not in to_server
    assert last.is_over or steps[1].is_over or len(read_requests(to_server)) == 1


def test_the_client_may_wait_before_its_body() -> None:
    """The question, the answer 100, the body and the final answer pass."""
    pair = guard()
    head = post(b"Expect: 100-continue", b"Content-Length: 3")
    assert pair.from_client(head) == Step(to_server=head)
    assert pair.from_server(b"HTTP/1.1 100 Continue\r\n\r\n") == Step(to_client=b"HTTP/1.1 100 Continue\r\n\r\n")
    assert pair.from_client(b"abc") == Step(to_server=b"abc")
    assert pair.from_server(OK) == Step(to_client=OK)
    assert pair.from_client(GET).to_server == GET


def test_an_answer_may_come_before_the_end_of_the_body() -> None:
    """The rest of the body passes, and the next request; bytes behind such an answer end the connection."""
    pair = guard()
    pair.from_client(post(b"Content-Length: 6", body=b"abc"))
    assert pair.from_server(OK) == Step(to_client=OK)
    assert pair.from_client(b"def" + GET) == Step(to_server=b"def" + GET)
    assert pair.from_server(OK) == Step(to_client=OK)
    pair.from_client(post(b"Content-Length: 6", body=b"abc"))
    assert pair.from_server(OK + OK) == Step(to_client=OK, is_over=True)


def test_head_and_empty_answers_have_no_body() -> None:
    """The length that they tell is that of another answer."""
    pair = guard()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
    pair.from_client(request(b"Host: example.org", line=b"HEAD / HTTP/1.1"))
    assert pair.from_server(answer) == Step(to_client=answer)
    pair.from_client(GET)
    answer = b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n"
    assert pair.from_server(answer) == Step(to_client=answer)
    assert pair.from_client(GET) == Step(to_server=GET)


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    """The client gets it in chunks, so that it can tell the end from a break."""
    pair = guard()
    pair.from_client(GET)
    steps = [pair.from_server(piece) for piece in (b"HTTP/1.1 200 OK\r\n\r\n", b"hi", b"")]
    _, to_client, last = summed(steps)
    assert to_client.endswith(b"\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
    assert b"chunked" in to_client
    assert (last.is_over, last.refused) == (True, None)


def test_http_1_0_has_one_request_on_a_connection() -> None:
    """The client gets no chunks and no interim answer; a server of that version is understood, too."""
    pair = guard()
    step = pair.from_client(b"GET / HTTP/1.0\r\nHost: example.org\r\n\r\n")
    assert step == Step(to_server=b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
    assert pair.from_server(b"HTTP/1.1 103 Early Hints\r\n\r\n") == Step()
    step = pair.from_server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
    assert (step.to_client.endswith(b"\r\n\r\nhi"), b"chunked" in step.to_client, step.is_over) == (True, False, True)
    pair = guard()
    pair.from_client(GET)
    step = pair.from_server(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    assert step.to_client.startswith(b"HTTP/1.1 200 OK\r\n")
    assert step.is_over


def test_after_a_websockets_switch_bytes_are_plain() -> None:
    """Early bytes of either side go along, and nothing is looked at any more."""
    pair = guard()
    step = pair.from_client(WEBSOCKET + b"early")
    assert (step.to_server, step.is_over, step.is_client_waiting) == (WEBSOCKET, False, True)
    step = pair.from_server(SWITCHING + b"\x81\2hi")
    assert step == Step(to_client=SWITCHING + b"\x81\2hi", to_server=b"early", wants_raw=True)
    assert pair.from_client(b"\0\xff") == Step(to_server=b"\0\xff", wants_raw=True)
    assert pair.from_server(b"\0\xff") == Step(to_client=b"\0\xff", wants_raw=True)


def test_a_websocket_that_is_refused_leaves_http() -> None:
    """The connection goes on with requests, each with its Host."""
    pair = guard()
    pair.from_client(WEBSOCKET)
    answer = b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\n\r\n"
    assert pair.from_server(answer) == Step(to_client=answer)
    assert pair.from_client(GET) == Step(to_server=GET)
    pair.from_server(OK)
    refused(pair.from_client(request(b"Host: evil.org")), Reason.HOST, 403)


@pytest.mark.parametrize(
    "offer", [b"h2c", b"websocket, h2c", b"tcp", b"TLS/1.0", b"websocket/13", b"", b"websocket\r\nUpgrade: h2c"]
)
def test_other_protocols_are_not_offered_to_the_server(offer: bytes) -> None:
    """Requests in them would be hidden; a server that switches all the same is cut off."""
    pair = guard()
    headers = (b"Connection: keep-alive, Upgrade, HTTP2-Settings", b"Upgrade: " + offer, b"HTTP2-Settings: AAMAAABk")
    step = pair.from_client(request(b"Host: example.org", *headers))
    assert step.to_server == b"GET / HTTP/1.1\r\nHost: example.org\r\nConnection: keep-alive\r\n\r\n"
    step = pair.from_server(SWITCHING)
    assert (step.is_over, step.refused, step.wants_raw) == (True, Reason.BAD_HTTP, False)
    assert not step.to_client.startswith(b"HTTP/1.1 101")


def test_a_server_that_speaks_unasked_is_cut_off() -> None:
    """Before a request, behind an answer, and when it ends an idle connection: the client gets nothing of it."""
    assert guard().from_server(OK) == Step(is_over=True)
    assert guard().from_server(b"") == Step(is_over=True)
    pair = guard()
    pair.from_client(GET)
    assert pair.from_server(OK + OK) == Step(to_client=OK, is_over=True)


def test_an_answer_that_breaks_off_breaks_off() -> None:
    """The client gets what there was and the end, and no end of the body is made up."""
    pair = guard()
    pair.from_client(GET)
    begin = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"
    assert pair.from_server(begin) == Step(to_client=begin)
    assert pair.from_server(b"") == Step(is_over=True)
    pair = guard()
    pair.from_client(GET)
    assert pair.from_server(b"") == Step(is_over=True)


def test_an_answer_that_is_none_is_refused() -> None:
    """With an error of ours, unless another answer has begun."""
    pair = guard()
    pair.from_client(GET)
    step = pair.from_server(b"SSH-2.0-x\r\n\r\n")
    assert (step.to_client[:12], step.is_over, step.refused) == (b"HTTP/1.1 502", True, Reason.BAD_HTTP)
    pair = guard()
    pair.from_client(GET)
    pair.from_server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert pair.from_server(b"zz\r\n\r\n") == Step(is_over=True, refused=Reason.BAD_HTTP)


def test_the_client_may_end_its_side_first() -> None:
    """The answer still passes; a request that breaks off ends the connection."""
    pair = guard()
    assert pair.from_client(GET) == Step(to_server=GET)
    assert pair.from_client(b"") == Step()
    assert pair.from_server(OK) == Step(to_client=OK, is_over=True)
    pair = guard()
    pair.from_client(post(b"Content-Length: 5", body=b"a"))
    assert pair.from_client(b"") == Step(is_over=True)
    pair = guard()
    pair.from_client(GET[:9])
    assert pair.from_client(b"").is_over


def test_requests_that_wait_are_bounded() -> None:
    """The caller is told to read no more; one who reads on has the connection ended."""
    pair = guard()
    step, given_bytes = pair.from_client(GET + GET), 0
    while not step.is_over:
        assert step.is_client_waiting
        step = pair.from_client(GET * 400)
        given_bytes += len(GET * 400)
    assert step.refused is Reason.LIMIT
    assert MAX_WAITING_BYTES < given_bytes < MAX_WAITING_BYTES + 2 * len(GET * 400)


def test_half_a_chunk_is_nothing_that_waits() -> None:
    """The caller reads on: it would else wait for ever."""
    assert not guard().from_client(post(b"Transfer-Encoding: chunked", body=b"1")).is_client_waiting
    assert not guard().from_client(GET[:-1]).is_client_waiting


@pytest.mark.parametrize("at", range(1, len(GET + OK)))
def test_cuts_make_no_difference(at: int) -> None:
    """A request with a body and its answer, and another, cut at each byte."""
    pair = guard()
    first = post(b"Content-Length: 3", body=b"abc")
    stream, steps = first, []
    for stream, feed in ((first, pair.from_client), (OK, pair.from_server), (GET, pair.from_client)):
        steps += [feed(piece) for piece in (stream[:at], stream[at:]) if piece]
    to_server, to_client, last = summed(steps)
    assert (to_server, to_client, last.is_over) == (first + GET, OK, False)


PIECES = st.sampled_from(
    [
        *(GET, OK, WEBSOCKET[:-2], b"\r\n", b"\n", b"\r", b" ", b"0\r\n\r\n", b"5\r\nhello\r\n", b"hello", b"\0"),
        *(b"Host: example.org\r\n", b"Host: evil.org\r\n", b"host:evil.org\n", b"X: y\r\n", b"GET / HTTP/1.1\r\n"),
        *(b"POST http://evil.org/ HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nHost: example.org\r\n", b"POST / HTTP/1.0\r\n"),
        *(b"Content-Length: 5\r\n", b"Content-Length: 43\r\n", b"Transfer-Encoding: chunked\r\n"),
        b"Connection: close\r\n",
        *(b"Expect: 100-continue\r\n", b"Transfer-Encoding:\tchunked \r\n", b"Upgrade: h2c\r\n", b" evil.org\r\n"),
        *(b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\n\r\n", b"HTTP/1.1 204 x\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b""),
    ]
)  # fmt: skip
MOVES = st.lists(st.tuples(st.booleans(), st.one_of(PIECES, PIECES, st.binary(max_size=30))), max_size=20)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([b"", b"POST / HTTP/1.1\r\nHost: example.org\r\n", GET[:-2], WEBSOCKET]), MOVES)
def test_the_server_reads_no_request_for_another_host(begin: bytes, moves: list[tuple[bool, bytes]]) -> None:
    """However the bytes of both sides fall: a strict reader finds one Host in each request, and it is the server's."""
    pair, to_server = guard(), b""
    for is_client, data in [(True, begin or b"G"), *moves]:
        step = pair.from_client(data) if is_client else pair.from_server(data)
        if step.wants_raw:
            break
        to_server += step.to_server
    for line, headers, _ in read_requests(to_server):
        hosts = [each.partition(b":")[2].strip() for each in headers if each.lower().startswith(b"host:")]
        assert hosts == [b"example.org"], line
        assert re.match(rb"[A-Za-z]+ /", line)
        assert not any(each.lower().startswith(b"upgrade") and b"h2c" in each for each in headers)


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        *((each, True) for each in (GET, WEBSOCKET, b"foo /a b http/1.1\r\n", b"\r\n \tGET\t/\x0bHTTP/")),
        *((each, True) for each in (b"GET /\n", b"PRI * HTTP/2.0", b"get http://evil.org/\r\n", b"GET  /\xff\r\n")),
        (b"x" * 17_000, True),
        *((each, None) for each in (b"", b"\r\n\r\n", b"G", b"GET", b"GET /", b"GET / HTTP", b"EHLO x", b"SSH-2.0-x")),
        *((each, False) for each in (b"\0", b"\x16\3", b"EHLO x\r\n", b"SSH-2.0-x y\r\n", b"GET key\r\n", b"{")),
        *((each, False) for each in (b"*1\r\n", b"AMQP\0", b"0032git-upload-pack /x\0host=y\0", b"GET\n/ HTTP/1.1")),
    ],
)  # fmt: skip
def test_http_is_told_from_other_protocols(data: bytes, answer: bool | None) -> None:
    """As a lenient server would; an answer that was given stays when more bytes come."""
    assert looks_like_http(data) is answer
    if len(data) < 1000:
        answers = [looks_like_http(data[:at]) for at in range(len(data) + 1)]
        known = [each for each in answers if each is not None]
        assert answers == [None] * (len(answers) - len(known)) + known
        assert known == [answer] * len(known)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_more_bytes_change_no_answer(data: bytes, more: bytes) -> None:
    """An answer stays, once given."""
    assert looks_like_http(data) in (None, looks_like_http(data + more))


@pytest.mark.parametrize("blank", [b"\r", b"\t", b" ", b"\r ", b" \r"])
@pytest.mark.parametrize("begin", [b"", b"GET", b"GET ", b"GET /", b"GET a", b"GET http://"])
def test_a_first_line_of_blanks_is_looked_at_once(begin: bytes, blank: bytes) -> None:
    """Time is in proportion to its length: all sessions wait meanwhile."""
    line = begin + blank * (256 * 1024)
    began = time.process_time()
    for size in (8 * 1024, 16 * 1024 - 1, len(line)):
        looks_like_http(line[:size])
    assert time.process_time() - began < 0.1


def test_a_large_body_is_fast() -> None:
    """A MiB each way takes less than a tenth of a second of the processor, in chunks as well; hostile chunks do not
    hold the loop for long.
    """
    body, pair = bytes(1 << 20), guard()
    begin = time.process_time()
    steps = [pair.from_client(post(b"Content-Length: 1048576"))]
    steps += [pair.from_client(body[at : at + MAX_FEED_BYTES]) for at in range(0, len(body), MAX_FEED_BYTES)]
    steps.append(pair.from_server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"))
    chunk = b"%x\r\n%s\r\n" % (MAX_FEED_BYTES, bytes(MAX_FEED_BYTES))
    steps += [pair.from_server(chunk) for _ in range(0, len(body), MAX_FEED_BYTES)]
    to_server, to_client, last = summed([*steps, pair.from_server(b"0\r\n\r\n")])
    assert (len(to_server) > 1 << 20, len(to_client) > 1 << 20, last.is_over) == (True, True, False)
    assert time.process_time() - begin < 0.1
    pair = guard()
    pair.from_client(post(b"Transfer-Encoding: chunked"))
    begin = time.process_time()
    pair.from_client(b"1\r\na\r\n" * (MAX_FEED_BYTES // 6))
    assert time.process_time() - begin < 0.2
