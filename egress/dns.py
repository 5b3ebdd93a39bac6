"""Questions and answers of DNS as bytes (RFC 1035; EDNS: RFC 6891, extended errors: RFC 8914). No input, no output.

A question is one of class IN in a message of at most 512 bytes. Other messages get an error, or silence where an answer
could start a loop of answers. An answer is at most 512 bytes long, so it is never truncated.
"""

from __future__ import annotations

import enum
import struct
from ipaddress import IPv4Address

import attrs

from egress.policy import InvalidRule, canonical_name

MAX_QUESTION_BYTES = 512
TYPE_A = 1
TYPE_AAAA = 28
_TYPE_OPT = 41
_CLASS_IN = 1
_HEADER = struct.Struct("!HHHHHH")
_FIXED = struct.Struct("!HHIH")
"""Type, class, time to live and length of data of a record, behind its name."""

_QR, _RD, _RA = 0x8000, 0x0100, 0x0080
_OPCODE = 0x7800
_MAX_LABEL_BYTES, _MAX_NAME_BYTES = 63, 255
_UDP_BYTES = 1232  # what we take at most: fits into the smallest IPv6 packet, as resolvers agreed in 2020
_EDE = 15
_MAX_TEXT_BYTES = 200
_POINTER_TO_QUESTION = b"\xc0\x0c"  # the name behind the header of 12 bytes (RFC 1035, 4.1.4)


class Rcode(enum.IntEnum):
    """Response codes."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5
    BADVERS = 16


class Ede(enum.IntEnum):
    """Extended errors."""

    NOT_READY = 14
    BLOCKED = 15
    FILTERED = 17


class _Malformed(Exception):
    pass


@attrs.frozen
class Question:
    """The question of a DNS query, and the parts of the query's header that the answer repeats."""

    id: int
    name: str
    """Canonical name, or empty where the bytes are no name of a host."""
    type: int
    raw: bytes
    """The question section: an answer repeats it, since clients compare the case of its letters."""
    is_edns: bool
    recursion_desired: bool


def parse_question(data: bytes) -> Question | bytes | None:
    """Return the question of a message, or the error to send, or None: send nothing."""
    if len(data) < _HEADER.size:
        return None
    id_, flags, questions, answers, authorities, additional = _HEADER.unpack_from(data)
    if flags & _QR:  # an answer: to answer it may go on for ever
        return None
    desired = bool(flags & _RD)
    bare = Question(id_, "", 0, b"", is_edns=False, recursion_desired=desired)
    if flags & _OPCODE:
        return answer_error(bare, Rcode.NOTIMP)
    if len(data) > MAX_QUESTION_BYTES or (questions, answers, authorities) != (1, 0, 0) or additional > 1:
        return answer_error(bare, Rcode.FORMERR)
    try:
        labels, end = _labels(data, _HEADER.size)
        type_, class_ = struct.unpack_from("!HH", data, end)
        end += 4
        version = _edns_version(data, end) if additional else None
        if not additional and end != len(data):
            raise _Malformed
    except (_Malformed, struct.error):
        return answer_error(bare, Rcode.FORMERR)
    question = Question(id_, _name(labels), type_, data[_HEADER.size : end], version is not None, desired)
    if version:
        return answer_error(question, Rcode.BADVERS)
    return question if class_ == _CLASS_IN else answer_error(question, Rcode.NOTIMP)


def _labels(data: bytes, at: int) -> tuple[list[bytes], int]:
    """Return the labels of an uncompressed name and the position behind it."""
    labels, start = [], at
    while at < len(data) and (length := data[at]):
        if length > _MAX_LABEL_BYTES:  # a pointer has nothing before the first name to point at
            raise _Malformed
        labels.append(data[at + 1 : at + 1 + length])
        at += 1 + length
    if at >= len(data) or at + 1 - start > _MAX_NAME_BYTES:
        raise _Malformed
    return labels, at + 1


def _edns_version(data: bytes, at: int) -> int:
    """Return the version of the OPT record that ends the message."""
    type_, _class, extended, length = _FIXED.unpack_from(data, at + 1)
    if data[at] != 0 or type_ != _TYPE_OPT or at + 1 + _FIXED.size + length != len(data):
        raise _Malformed
    return int(extended >> 16 & 0xFF)


def _name(labels: list[bytes]) -> str:
    if any(b"." in label or not label.isascii() for label in labels):  # a dot inside of a label would make two of it
        return ""
    try:
        return canonical_name(b".".join(labels).decode("ascii"))
    except InvalidRule:
        return ""


def answer_address(question: Question, address: IPv4Address, ttl: int) -> bytes:
    """Return the answer with one address, which lives `ttl` seconds. The question is of type A."""
    record = _POINTER_TO_QUESTION + _FIXED.pack(TYPE_A, _CLASS_IN, ttl, 4) + address.packed
    return _answer(question, Rcode.NOERROR, record)


def answer_nothing(question: Question) -> bytes:
    """Return the answer that the name exists and has nothing of this type."""
    return _answer(question, Rcode.NOERROR)


def answer_error(question: Question, rcode: int, *, ede: int | None = None, text: str = "") -> bytes:
    """Return the answer with a response code. Clients with EDNS get the extended error and its text, too."""
    if ede is None:
        return _answer(question, rcode)
    extra = text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()  # whole characters
    return _answer(question, rcode, option=struct.pack("!HHH", _EDE, 2 + len(extra), ede) + extra)


def _answer(question: Question, rcode: int, record: bytes = b"", *, option: bytes = b"") -> bytes:
    flags = _QR | _RA | (_RD if question.recursion_desired else 0) | (rcode & 0xF)
    counts = (int(bool(question.raw)), int(bool(record)), 0, int(question.is_edns))
    edns = b""
    if question.is_edns:
        edns = b"\0" + _FIXED.pack(_TYPE_OPT, _UDP_BYTES, rcode >> 4 << 24, len(option)) + option
    return _HEADER.pack(question.id, flags, *counts) + question.raw + record + edns
