"""ClientHellos as OpenSSL sends them, cut at every byte, spoiled, and read by OpenSSL as well."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egress.hello import MAX_HELLO_BYTES, ClientHello, HelloReader, NotTls


def real_hello(name: str | None, *, most: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED) -> bytes:
    """Return what OpenSSL sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode, context.maximum_version = False, ssl.CERT_NONE, most
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def name_openssl_reads(data: bytes) -> list[str | None]:
    """Return the server names that a server on OpenSSL is told of, at most one; empty if it refuses before."""
    seen: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _socket, name, _context: seen.append(name)
    incoming = ssl.MemoryBIO()
    incoming.write(data)
    with pytest.raises(ssl.SSLError):  # there is no certificate, or not all bytes
        context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
    return seen


def read(pieces: Iterable[bytes]) -> ClientHello | NotTls | None:
    reader, result = HelloReader(), None
    for piece in pieces:
        result = reader.feed(piece)
    return result


def vector(data: bytes, size: int) -> bytes:
    return len(data).to_bytes(size, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "big") + vector(data, 2)


def server_name(*names: bytes, kind: int = 0, behind: bytes = b"") -> bytes:
    entries = b"".join(bytes([kind]) + vector(name, 2) for name in names)
    return extension(0, vector(entries, 2) + behind)


def handshake(*extensions: bytes, kind: int = 1, behind: bytes = b"", has_extensions: bool = True) -> bytes:
    body = b"\3\3" + bytes(32) + vector(bytes(32), 1) + vector(b"\x13\1", 2) + vector(b"\0", 1)
    body += (vector(b"".join(extensions), 2) if has_extensions else b"") + behind
    return bytes([kind]) + vector(body, 3)


def records(message: bytes, size: int = 1 << 14, *, kind: int = 22, version: bytes = b"\3\1") -> bytes:
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(bytes([kind]) + version + vector(piece, 2) for piece in pieces)


HELLO = real_hello("example.org")
OLD_HELLO = real_hello("example.org", most=ssl.TLSVersion.TLSv1_2)
NAMED = server_name(b"example.org")


@pytest.mark.parametrize("most", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.MAXIMUM_SUPPORTED])
@pytest.mark.parametrize("name", ["example.org", "a-b.xn--bcher-kva.example", "x", None])
def test_a_real_hello_has_its_name(name: str | None, most: ssl.TLSVersion) -> None:
    """With a name and without, of TLS 1.2 and 1.3; what follows in the connection makes no difference."""
    data = real_hello(name, most=most)
    hello = read([data])
    assert isinstance(hello, ClientHello)
    assert (hello.server_name, hello.has_ech, hello.fault is None) == (name, False, name is not None)
    assert read([data + b"\x14\3\3\0\1\1" + bytes(70_000)]) == hello


@pytest.mark.parametrize("hello", [HELLO, OLD_HELLO])
def test_a_hello_may_arrive_in_any_pieces(hello: bytes) -> None:
    """Cut at each byte, there is no result before the last byte, and then the same."""
    for at in range(len(hello)):
        assert read([hello[:at]]) is None
        assert read([hello[:at], hello[at:]]) == ClientHello("example.org")
    assert read(bytes([byte]) for byte in hello) == ClientHello("example.org")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64])
def test_a_hello_may_be_in_several_records(size: int) -> None:
    """As OpenSSL reads it, too."""
    data = records(HELLO[5:], size)
    assert name_openssl_reads(data) == ["example.org"]
    assert read([data]) == read(bytes([byte]) for byte in data) == ClientHello("example.org")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ssl, of names beyond ASCII
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([HELLO, OLD_HELLO, records(HELLO[5:], 50), b"\x15\3\1\0\2\1\0" + OLD_HELLO]),
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from(["set", "cut", "put"]), st.binary(max_size=4)), max_size=3),
)
def test_a_server_never_sees_another_name(data: bytes, changes: list[tuple[int, str, bytes]]) -> None:
    """Where OpenSSL reads a name out of spoiled bytes, it is the name read here, or the hello is refused."""
    for at, kind, given_bytes in changes:
        rest = at + (len(given_bytes) if kind == "set" else 0 if kind == "put" else 1)
        data = data[:at] + given_bytes + data[rest:]
    result = read([data])
    for name in name_openssl_reads(data):
        assert isinstance(result, ClientHello)
        assert result.server_name is None or result.server_name == (name or "").lower().removesuffix(".")


def test_the_name_is_canonical() -> None:
    """In lower case, without the dot at its end."""
    assert read([records(handshake(server_name(b"Example.ORG.")))]) == ClientHello("example.org")


def test_an_encrypted_hello_is_told_of() -> None:
    """The name is the outer one."""
    assert read([records(handshake(NAMED, extension(0xFE0D, bytes(9))))]) == ClientHello("example.org", has_ech=True)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (records(handshake()), "no server name"),
        (records(handshake(has_extensions=False)), "no server name"),
        (records(handshake(NAMED, NAMED)), "extension 0 twice"),
        (records(handshake(extension(9, b""), NAMED, extension(9, b""))), "extension 9 twice"),
        (records(handshake(server_name(b"example.org", b"evil.org"))), "several"),
        (records(handshake(server_name(b"example.org", kind=1))), "unknown type"),
        (records(handshake(server_name(b"example.org", behind=b"\0"))), "bytes behind"),
        (records(handshake(server_name(b""))), "no name"),
        (records(handshake(server_name())), "beyond its end"),
        (records(handshake(extension(0, b""))), "beyond its end"),
        (records(handshake(server_name(b"127.0.0.1"))), "no name"),
        (records(handshake(server_name(b"example.org\0.evil.org"))), "no name"),
        (records(handshake(server_name("bücher.de".encode()))), "no name"),
        (records(handshake(NAMED, behind=b"\0")), "bytes behind"),
        (records(handshake(NAMED, b"\0\7\0\1")), "beyond its end"),
        (records(handshake(NAMED, kind=2)), "no ClientHello"),
        (records(handshake(NAMED) + b"\1"), "shares a record"),
        (records(handshake(NAMED), version=b"\2\0"), "type or version"),
        (records(handshake(NAMED), 50)[:55] + records(b"\1\0", kind=21) + b"x" * 99, "type or version"),
        (records(b"\1\0", kind=21) + HELLO, "type or version"),
        (b"\x16\3\1\0\0" + HELLO, "wrong size"),
        (b"\x16\3\1\x40\1" + HELLO, "wrong size"),
        (records(handshake(NAMED, extension(21, bytes(16_000)), extension(22, bytes(1000)))), "more than 16384"),
        (b"\x80\x2e\1\3\1\0\x15\0\0\0\x10", "SSL 2"),
    ],
)
def test_a_broken_hello_is_a_hello_without_a_name(data: bytes, fault: str) -> None:
    """However its bytes arrive. A more lenient server would read something else."""
    hello = read([data])
    assert isinstance(hello, ClientHello)
    assert hello.server_name is None
    assert fault in (hello.fault or "")
    assert read(bytes([byte]) for byte in data) == hello


@pytest.mark.parametrize(
    ("data", "at"),
    [
        *((bytes([first]), 1) for first in (0, 1, 19, 25, 0x47, 0x7F)),
        *((bytes([kind, 2]), 2) for kind in (20, 21, 23, 24)),
        (b"\xff\xfd\3", 3),
        (b"\x80\x01\1\2", 4),
    ],
)
def test_other_protocols_are_told_as_early_as_possible(data: bytes, at: int) -> None:
    """A client that waits for its server is not kept waiting; the result stays."""
    reader = HelloReader()
    assert [reader.feed(bytes([byte])) for byte in data] == [None] * (at - 1) + [NotTls()]
    assert reader.feed(HELLO) == NotTls()


@given(
    st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=8), st.sampled_from([b"", HELLO[:9], HELLO[:120]])
)
def test_no_bytes_make_an_error_of_python(data: bytes, sizes: list[int], before: bytes) -> None:
    """Cuts make no difference to the result either."""
    whole, pieces, at = before + data, [], 0
    for size in sizes:
        pieces.append(whole[at : at + size])
        at += size
    assert read([*pieces, whole[at:]]) == read([whole])


def test_the_reader_holds_little() -> None:
    """A client that never ends its hello has a result once the bound is reached, and no byte is kept."""
    reader = HelloReader()
    data = records(b"\1\0\xff\xff" + bytes(60_000), 1)
    results = [reader.feed(bytes([byte])) for byte in data[: MAX_HELLO_BYTES + 9]]
    assert results[MAX_HELLO_BYTES - 2] is None
    assert isinstance(results[MAX_HELLO_BYTES - 1], ClientHello)
    assert len(reader._records) + len(reader._message) == 0
