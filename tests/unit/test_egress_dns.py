"""DNS of a way out: questions as clients send them, answers read by another decoder, and hostile bytes."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress.dns import (
    TYPE_A,
    TYPE_AAAA,
    Ede,
    Question,
    Rcode,
    answer_address,
    answer_error,
    answer_nothing,
    parse_question,
)

NAMES = st.lists(st.text("abcxyz0189-_", min_size=1, max_size=12), min_size=1, max_size=5).map(".".join)


def labels(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def message(
    name: bytes = labels("example.org"),
    *,
    flags: int = 0x0100,
    counts: tuple[int, int, int, int] = (1, 0, 0, 0),
    type_: int = TYPE_A,
    class_: int = 1,
    rest: bytes = b"",
) -> bytes:
    return struct.pack("!HHHHHH", 0xBEEF, flags, *counts) + name + struct.pack("!HH", type_, class_) + rest


def opt(
    *, version: int = 0, data: bytes = b"", name: bytes = b"\0", type_: int = 41, length: int | None = None
) -> bytes:
    return name + struct.pack("!HHIH", type_, 4096, version << 16, len(data) if length is None else length) + data


def edns(**fields: Any) -> bytes:
    return message(counts=(1, 0, 0, 1), rest=opt(**fields))


@attrs.frozen
class Decoded:
    """An answer as a client reads it."""

    id: int
    flags: int
    question: bytes
    records: list[tuple[str, int, int, int, bytes]]
    options: dict[int, bytes]
    extended: int

    @property
    def rcode(self) -> int:
        return self.extended << 4 | self.flags & 0xF


def decode(data: bytes) -> Decoded:
    """Read an answer by RFC 1035 and RFC 6891, compressed names included, to the last byte."""
    id_, flags, *counts = struct.unpack_from("!6H", data)
    at, records, options, extended, question = 12, [], {}, 0, b""

    def name(position: int) -> tuple[str, int]:
        words: list[str] = []
        while length := data[position]:
            if length & 0xC0 == 0xC0:
                pointed, _ = name(struct.unpack_from("!H", data, position)[0] & 0x3FFF)
                return ".".join([*words, pointed]), position + 2
            words.append(data[position + 1 : position + 1 + length].decode("latin-1"))
            position += 1 + length
        return ".".join(words), position + 1

    for _ in range(counts[0]):
        start = at
        at = name(at)[1] + 4
        question = data[start:at]
    for section in (1, 2, 3):
        for _ in range(counts[section]):
            owner, at = name(at)
            type_, class_, ttl, length = struct.unpack_from("!HHIH", data, at)
            content = data[at + 10 : at + 10 + length]
            assert len(content) == length
            at += 10 + length
            if type_ != 41:
                records.append((owner, type_, class_, ttl, content))
                continue
            extended = ttl >> 24
            while content:
                code, size = struct.unpack_from("!HH", content)
                options[code], content = content[4 : 4 + size], content[4 + size :]
    assert at == len(data)
    return Decoded(id_, flags, question, records, options, extended)


def asked(data: bytes) -> Question:
    question = parse_question(data)
    assert isinstance(question, Question)
    return question


def refused(data: bytes) -> Decoded:
    answer = parse_question(data)
    assert isinstance(answer, bytes)
    return decode(answer)


@given(NAMES, st.sampled_from([TYPE_A, TYPE_AAAA, 65, 16]), st.booleans(), st.booleans())
def test_a_question_is_read(name: str, type_: int, desired: bool, with_edns: bool) -> None:
    """Name, type and the rest are those that were sent; a name whose end is a number is unusable."""
    rest = opt(data=struct.pack("!HH8s", 10, 8, b"cookie..")) if with_edns else b""
    data = message(labels(name), flags=desired << 8, counts=(1, 0, 0, int(with_edns)), type_=type_, rest=rest)
    question = asked(data)
    last = name.rpartition(".")[2]
    assert question.name == ("" if last.isdigit() or last.startswith("0x") else name)
    assert (question.id, question.type, question.is_edns) == (0xBEEF, type_, with_edns)
    assert (question.recursion_desired, question.raw) == (desired, labels(name) + struct.pack("!HH", type_, 1))


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (labels("ExAmPle.ORG"), "example.org"),
        (b"\0", ""),
        (b"\3a.b\3org\0", ""),
        (b"\3a\0b\0", ""),
        (b"\2\xc3\xa9\3org\0", ""),
        (b"\1*\3org\0", ""),
        (labels("1.2.3.4"), ""),
        (b"\x3f" + b"x" * 63 + b"\0", "x" * 63),
    ],
)
def test_a_name_that_is_none_is_told_from_the_others(raw: bytes, name: str) -> None:
    """The question can be answered, and no rule can be for it."""
    assert asked(message(raw)).name == name
    assert decode(answer_error(asked(message(raw)), Rcode.NXDOMAIN)).question[: len(raw)] == raw


@pytest.mark.parametrize(
    ("data", "rcode"),
    [
        (message(counts=(0, 0, 0, 0)), Rcode.FORMERR),
        (message(counts=(2, 0, 0, 0), rest=labels("a") + b"\0\1\0\1"), Rcode.FORMERR),
        (message(counts=(1, 1, 0, 0), rest=opt()), Rcode.FORMERR),
        (message(counts=(1, 0, 1, 0), rest=opt()), Rcode.FORMERR),
        (message(counts=(1, 0, 0, 2), rest=opt() + opt()), Rcode.FORMERR),
        (message(rest=b"\0"), Rcode.FORMERR),
        (message(b"\xc0\x0c"), Rcode.FORMERR),
        (message(b"\1a\xc0\x0c"), Rcode.FORMERR),
        (message(b"\x40" + b"x" * 64 + b"\0"), Rcode.FORMERR),
        (message(labels(".".join(["x" * 63] * 4))), Rcode.FORMERR),
        (message(rest=b"\0" * 500), Rcode.FORMERR),
        (message()[:-1], Rcode.FORMERR),
        (message()[:20], Rcode.FORMERR),
        (edns(name=labels("a")), Rcode.FORMERR),
        (edns(type_=250), Rcode.FORMERR),
        (edns(length=1), Rcode.FORMERR),
        (edns()[:-1], Rcode.FORMERR),
        (edns(version=1), Rcode.BADVERS),
        (message(flags=0x2800), Rcode.NOTIMP),
        (message(class_=3), Rcode.NOTIMP),
    ],
)
def test_other_messages_get_an_error(data: bytes, rcode: Rcode) -> None:
    """The error has the id of the message and says that it is an answer."""
    answer = refused(data)
    assert (answer.id, answer.flags & 0x8000, answer.rcode) == (0xBEEF, 0x8000, rcode)
    assert answer.records == []


@pytest.mark.parametrize("data", [b"", b"\0" * 11, message(flags=0x8180), message(flags=0x8000, counts=(9, 9, 9, 9))])
def test_silence_where_an_answer_could_be_answered(data: bytes) -> None:
    """To what is an answer itself, and to what is too short to have an id."""
    assert parse_question(data) is None


@given(st.one_of(st.binary(max_size=600), st.binary(max_size=80).map(lambda data: message()[:12] + data)))
def test_no_bytes_make_an_error_of_python(data: bytes) -> None:
    """A question, an answer that can be read, or silence; an answer is never longer than 512 bytes."""
    result = parse_question(data)
    if isinstance(result, Question):
        result = answer_error(result, Rcode.NXDOMAIN, ede=Ede.FILTERED, text="x" * 600)
    if result is not None:
        assert decode(result).id == int.from_bytes(data[:2], "big")
        assert len(result) <= 512


@given(NAMES, st.integers(0, 2**32 - 1).map(IPv4Address), st.booleans())
def test_an_answer_has_the_address(name: str, address: IPv4Address, with_edns: bool) -> None:
    """One record of the name that was asked for, in its spelling, and EDNS only for those who have it."""
    data = message(labels(name.upper()), counts=(1, 0, 0, int(with_edns)), rest=opt() if with_edns else b"")
    question = asked(data)
    answer = decode(answer_address(question, address, 5))
    assert answer.records == [(name.upper(), TYPE_A, 1, 5, address.packed)]
    assert (answer.rcode, answer.question, answer.flags & 0x0380) == (Rcode.NOERROR, question.raw, 0x0180)
    nothing = decode(answer_nothing(question))
    assert (nothing.rcode, nothing.records, nothing.question) == (Rcode.NOERROR, [], question.raw)


@given(st.sampled_from([Ede.FILTERED, Ede.BLOCKED, Ede.NOT_READY]), st.text(max_size=300))
def test_an_extended_error_is_for_those_with_edns(ede: Ede, text: str) -> None:
    """The text is cut between characters; without EDNS there is the plain error."""
    options = decode(answer_error(asked(edns()), Rcode.NXDOMAIN, ede=ede, text=text)).options
    shown = text.encode("utf-8", "replace").decode()
    assert int.from_bytes(options[15][:2], "big") == ede
    assert shown.startswith(options[15][2:].decode())
    assert len(options[15]) > 190 or options[15][2:].decode() == shown
    plain = answer_error(asked(message()), Rcode.REFUSED, ede=ede, text=text)
    assert (decode(plain).rcode, decode(plain).options, len(plain)) == (Rcode.REFUSED, {}, len(message()))
