"""Requests that are wrong in one way each. The first five once ended a whole process that served them unguarded."""

from __future__ import annotations

import struct

import h2.config
import h2.connection
import hpack

_UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)
_GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\n"


def http2_request(path: bytes) -> bytes:
    """A cleartext HTTP/2 request whose path no client library would send."""
    config = h2.config.H2Configuration(client_side=True, header_encoding=None, validate_outbound_headers=False)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    fields = [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"localhost"), (b":path", path)]
    block = hpack.Encoder().encode(fields)
    frame = struct.pack(">I", len(block))[1:] + b"\x01\x05" + struct.pack(">I", 1) + block
    return connection.data_to_send() + frame


def _http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    config = h2.config.H2Configuration(client_side=True)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
    return connection.data_to_send() + head + payload


KILLERS: dict[str, bytes] = {
    "websocket_subprotocol_not_ascii": _UPGRADE + b"Sec-WebSocket-Protocol: \xff\xfe\r\n\r\n",
    "websocket_extension_not_ascii": _UPGRADE + b"Sec-WebSocket-Extensions: \xff\xfe\r\n\r\n",
    "websocket_unmasked_early_frame": _UPGRADE + b"\r\n\x81\x05hello",
    "websocket_bad_utf8_early_frame": _UPGRADE + b"\r\n\x81\x82\x00\x00\x00\x00\xff\xfe",
    "http2_path_not_ascii": http2_request(b"/\xff\xfe"),
}

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "one_byte": b"G",
    "only_newlines": b"\r\n" * 50,
    "binary": bytes(range(256)) * 4,
    "tls_client_hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "no_version": b"GET /\r\n\r\n",
    "http_0_9": b"GET /healthz HTTP/0.9\r\n\r\n",
    "http_1_0_without_host": b"GET /healthz HTTP/1.0\r\n\r\n",
    "http_9": b"GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "no_host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two_hosts": b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "host_not_ascii": b"GET /healthz HTTP/1.1\r\nHost: \xff\r\n\r\n",
    "host_with_port_of_letters": b"GET /healthz HTTP/1.1\r\nHost: localhost:abc\r\n\r\n",
    "host_with_brackets": b"GET /healthz HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "nul_in_path": b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_not_ascii": b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_percent_garbage": b"GET /%zz%ff%00%f0%9f HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_empty_with_query": b"GET ?a=b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_star": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_absolute": b"GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_absolute_broken": b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_authority": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_dots": b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_double_slash": b"GET //evil.example/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "query_garbage": b"GET /healthz?%ff=%zz&&&==&a HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "method_garbage": b"G\xcbT /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "method_long": b"A" * 5000 + b" /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "header_without_colon": _GET + b"nonsense\r\n\r\n",
    "header_with_space": _GET + b"Bad Name: x\r\n\r\n",
    "header_nul": _GET + b"X: a\x00b\r\n\r\n",
    "header_not_ascii": _GET + b"X-Request-ID: \xff\xfe\r\nAuthorization: Bearer \xff\r\nCookie: \xff\r\n\r\n",
    "header_folded": _GET + b"X: a\r\n b\r\n\r\n",
    "headers_too_large": _GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "headers_too_large_in_one_segment": _GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
    "headers_too_many": _GET + b"".join(b"X-%d: y\r\n" % number for number in range(150)) + b"\r\n",
    "length_negative": _POST + b"Content-Length: -1\r\n\r\n",
    "length_not_a_number": _POST + b"Content-Length: ten\r\n\r\n",
    "length_huge": _POST + b"Content-Length: 99999999999999999999\r\n\r\nx",
    "lengths_differ": _POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length_and_chunked": _POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "length_short_body": _POST + b"Content-Length: 100\r\n\r\nab",
    "chunk_size_garbage": _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n",
    "chunk_size_huge": _POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nab",
    "chunk_without_end": _POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
    "transfer_encoding_unknown": _POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "expect_unknown": _POST + b"Expect: 200-ok\r\nContent-Length: 1\r\n\r\nx",
    "expect_continue_without_body": _POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    "websocket_without_key": _GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "websocket_version_1": _UPGRADE.replace(b"Version: 13", b"Version: 1") + b"\r\n",
    "websocket_http_1_0": _UPGRADE.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n",
    "websocket_key_not_ascii": _UPGRADE.replace(b"dGhl", b"\xff\xfe") + b"\r\n",
    "websocket_reserved_bits": _UPGRADE + b"\r\n\xf1\x80\x00\x00\x00\x00",
    "websocket_giant_frame": _UPGRADE + b"\r\n\x82\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    "websocket_garbage_extension": _UPGRADE + b"Sec-WebSocket-Extensions: permessage-deflate; x=\r\n\r\n",
    "h2c_upgrade": _GET + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
    "h2c_upgrade_garbage_settings": _GET + b"Upgrade: h2c\r\nConnection: Upgrade\r\nHTTP2-Settings: \xff\xff\r\n\r\n",
    "http2_preface_alone": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http2_preface_and_garbage": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(64)),
    "http2_plain_request": http2_request(b"/healthz"),
    "http2_headers_without_method": _http2_frame(1, 5, 1, hpack.Encoder().encode([(b":path", b"/")])),
    "http2_connect_without_path": _http2_frame(1, 5, 1, hpack.Encoder().encode([(b":method", b"CONNECT")])),
    "http2_data_on_idle_stream": _http2_frame(0, 1, 7, b"data"),
    "http2_priority_on_itself": _http2_frame(2, 0, 1, struct.pack(">IB", 1, 5)),
    "http2_window_overflow": _http2_frame(8, 0, 0, struct.pack(">I", 2**31 - 1)),
    "two_pipelined_then_garbage": (_GET + b"\r\n") * 2 + b"\xff\xff\xff\r\n\r\n",
}
