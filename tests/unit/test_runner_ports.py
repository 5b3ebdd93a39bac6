"""Parsing of the kernel's answers about listeners, and how often it is asked."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.server.ports import (
    NoAnswer,
    Watcher,
    encode_request,
    parse_answer,
    parse_table,
    pause_s,
    read_listeners,
    read_table,
)
from runner.server.sockets import count_sockets
from runner.wire.protocol import ANSWERS, MAX_FRAME_BYTES, Kind, PortClosed, PortOpened

FAMILIES = st.sampled_from([socket.AF_INET, socket.AF_INET6])

TABLE = b"""\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1 1 0000000000000000 100 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0000000000000000 100 0
   2: 0100007F:B2F4 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 3 1 0000000000000000 20 4
  10: 0200007F:ZZZZ 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4 1 0000000000000000 100 0
  11: 0200007F:1F9"""

TABLE_6 = b"""\
   0: 00000000000000000000000000000000:1F90 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 0
   1: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 0
"""


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 0) + body


def listener(family: int, port: int, address: bytes, state: int = 10) -> bytes:
    body = struct.pack("=BBBB", family, state, 0, 0) + port.to_bytes(2, "big") + b"\0\0" + address.ljust(64, b"\0")
    return message(18, body)


DONE = message(3, b"\0\0\0\0")


def test_an_answer_has_ports_and_addresses() -> None:
    """Of listening sockets of both families, until the kernel says that was all."""
    data = (
        listener(socket.AF_INET, 8080, bytes([127, 0, 0, 1]))
        + listener(socket.AF_INET, 22, bytes(4))
        + listener(socket.AF_INET, 23, bytes(4), state=1)
        + listener(socket.AF_INET6, 24, bytes(16))
        + listener(socket.AF_UNIX, 25, bytes(16))
    )
    expected = [(8080, "127.0.0.1"), (22, "0.0.0.0"), (24, "::")]
    assert parse_answer(data) == (expected, False)
    assert parse_answer(data + DONE) == (expected, True)
    six = listener(socket.AF_INET6, 80, bytes(15) + b"\1")
    assert parse_answer(six) == ([(80, "::1")], False)


@pytest.mark.parametrize(
    "data",
    [
        message(2, struct.pack("=i", -2)),
        message(18, b"x" * 72)[:-1],
        struct.pack("=IHHII", 0, 18, 0, 0, 0),
        struct.pack("=IHHII", 15, 18, 0, 0, 0),
        b"\0" * 7,
        DONE[:8],
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    """An error of the kernel, and what is cut short."""
    with pytest.raises(NoAnswer):
        parse_answer(data)


@given(FAMILIES, st.binary(max_size=400))
def test_garbage_is_no_listener_or_no_answer(family: int, data: bytes) -> None:
    """Nothing else happens, whatever the bytes."""
    with contextlib.suppress(NoAnswer):
        found, _ = parse_answer(data)
        assert all(0 <= port < 65536 for port, _ in found)
    assert all(0 <= port < 65536 for port, _ in parse_table(family, data))


def test_a_table_has_ports_and_addresses() -> None:
    """Lines in another state, of another shape or cut short are none."""
    assert list(parse_table(socket.AF_INET, TABLE)) == [(8080, "127.0.0.1"), (22, "0.0.0.0")]
    assert list(parse_table(socket.AF_INET6, TABLE_6)) == [(8080, "::"), (80, "::1")]
    assert list(parse_table(socket.AF_INET, TABLE_6)) == []


@given(FAMILIES, st.integers(1, 65535), st.binary(min_size=16, max_size=16))
def test_both_sources_agree(family: int, port: int, address: bytes) -> None:
    """The same socket is the same listener in an answer and in the table."""
    size = 4 if family == socket.AF_INET else 16
    words = b"".join(b"%08X" % word for word in struct.unpack(f"={size // 4}I", address[:size]))
    line = b"  12: %s:%04X %s:0000 0A 00000000:00000000 00:00000000\n" % (words, port, words)
    assert list(parse_table(family, line)) == parse_answer(listener(family, port, address[:size]))[0]


def test_the_kernel_here_answers() -> None:
    """A listener of this process is found, and is gone when it is closed."""
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as server_6,
        socket.socket(socket.AF_NETLINK, kind, 4) as diag,
    ):
        own = (server.getsockname()[1], "127.0.0.1")
        assert (server_6.getsockname()[1], "::1") in read_listeners(diag) & read_listeners(None)
        request = encode_request()
        assert len(request) == struct.unpack_from("=I", request)[0] == 76
        diag.send(encode_request())  # and nobody takes the answer
        assert own in read_listeners(diag) & read_listeners(None)
        assert own in parse_table(socket.AF_INET, read_table(socket.AF_INET))
        server.close()
        assert own not in read_listeners(diag) | read_listeners(None)
    assert own not in parse_table(socket.AF_INET, read_table(socket.AF_INET))


def test_a_long_table_is_read_beyond_its_first_page() -> None:
    """Hundreds of listeners are all there."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.3", 0))) for _ in range(100)]
        own = {(server.getsockname()[1], "127.0.0.3") for server in servers}
        assert own <= set(parse_table(socket.AF_INET, read_table(socket.AF_INET)))


def test_the_pauses_grow_with_the_time_nothing_began() -> None:
    """From a twentieth of a second to two, slower while a command runs than afterwards."""
    assert [pause_s(is_busy=True, since_s=since) for since in (0, 4, 8, 3600)] == [0.05, 0.05, 0.1, 2.0]
    assert [pause_s(is_busy=False, since_s=since) for since in (0, 0.4, 4, 3600)] == [0.05, 0.05, 0.5, 2.0]


class Peer:
    """A `Sink` that keeps what it is sent, with as much room as the test says."""

    piece_bytes = MAX_FRAME_BYTES

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.is_full = False

    def send(self, kind: Kind, body: bytes) -> None:
        assert kind is Kind.EVENT
        self.events.append(ANSWERS.decode(body))

    def start(self, message: object) -> None: ...

    def finish(self, message: object) -> None: ...

    def refresh_input(self) -> None: ...


def test_a_watcher_without_room_gets_the_difference_later() -> None:
    """Ports that opened and closed meanwhile are not told of; nothing piles up."""
    peer = Peer()
    watcher = Watcher(peer, lambda _watcher: None)
    watcher.tell(frozenset({(1, "::"), (2, "::")}))
    peer.is_full = True
    for number in range(3, 1000):
        watcher.tell(frozenset({(2, "::"), (number, "::")}))
    assert peer.events == [PortOpened(1, "::"), PortOpened(2, "::")]
    peer.is_full = False
    watcher.on_drained()
    assert peer.events[2:] == [PortClosed(1, "::"), PortOpened(999, "::")]


SOCKSTAT = b"sockets: used 23\nTCP: inuse 3 orphan 0 tw 0 alloc 4 mem 177\nUDP: inuse 2 mem 90\n"
PROTOCOLS = b"""protocol  size sockets  memory press maxhdr  slab module     cl co
TCPv6     2432      2     177   no     192   yes  kernel      y  y
UNIX-STREAM 1152      4      -1   NI       0   yes  kernel      y  y
UNIX      1152      5      -1   NI       0   yes  kernel      y  y
UDP       1344      2      90   NI       0   yes  kernel      y  y
TCP       2304      3     177   no     192   yes  kernel      y  y
NETLINK   1096      1      -1   NI       0   no   kernel      y  y
"""


def test_unix_sockets_are_left_out_and_unbound_datagram_sockets_are_not() -> None:
    """Of 23 sockets 9 are Unix's and 5 TCP's; the table shows 3 others, the rest are not bound yet."""
    assert count_sockets(SOCKSTAT, PROTOCOLS) == (14, 9)
