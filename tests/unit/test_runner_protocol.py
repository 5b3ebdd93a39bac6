"""The frames and messages between daemon and runner: exact, bounded, and in error for good after an error."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.wire import protocol
from runner.wire.protocol import (
    ANSWERS,
    FROM_DAEMON,
    FROM_RUNNER,
    REQUESTS,
    Exec,
    ExecReply,
    Frame,
    FrameDecoder,
    Kind,
    ProtocolError,
    encode_frame,
    encode_header,
)

LIMIT = 64

frames = st.tuples(st.sampled_from(sorted(FROM_RUNNER)), st.binary(max_size=LIMIT))
texts = st.text(st.characters(codec="utf-8")) | st.text(max_size=5)
numbers = st.integers(-(2**70), 2**70)

execs = st.builds(
    Exec,
    exec_id=texts,
    command=texts,
    timeout_ms=st.none() | numbers,
    cwd=st.none() | texts,
    env=st.dictionaries(texts, texts, max_size=3),
    stdin=st.booleans(),
)
requests = st.one_of(
    execs,
    st.builds(protocol.Hello, version=numbers),
    st.builds(protocol.Setup, env=st.dictionaries(texts, texts, max_size=3), shell=texts, version=numbers),
    st.builds(protocol.GetFile, path=texts, start=st.none() | numbers),
    st.builds(protocol.PutFile, path=texts, sync=st.booleans()),
)


def decode(stream: list[bytes]) -> tuple[list[Frame], bool]:
    """Return the frames in the pieces of a stream, and whether it broke the protocol."""
    decoder = FrameDecoder(FROM_RUNNER, max_body_bytes=LIMIT)
    found: list[Frame] = []
    try:
        for piece in stream:
            decoder.feed(piece)
            found.extend(decoder)
    except ProtocolError:
        return found, True
    return found, False


@given(st.lists(frames))
def test_frames_come_back(sent: list[Frame]) -> None:
    """Messages come back from their encoding."""
    assert decode([b"".join(encode_frame(*frame) for frame in sent)]) == (sent, False)


@given(
    st.binary(max_size=200) | st.lists(frames).map(lambda sent: b"".join(encode_frame(*each) for each in sent)),
    st.integers(1, 40),
)
def test_cuts_do_not_matter(stream: bytes, size: int) -> None:
    """A stream in one piece, in pieces and byte by byte gives the same frames and the same error, garbage included."""
    whole, *cut = (
        decode([stream[index : index + each] for index in range(0, len(stream), each)])
        for each in (len(stream) or 1, size, 1)
    )
    assert cut == [whole, whole]


@given(st.binary(max_size=100), st.binary(max_size=20))
def test_an_error_stays(garbage: bytes, more: bytes) -> None:
    """After an error every further call fails, whatever comes."""
    decoder = FrameDecoder(FROM_RUNNER, max_body_bytes=LIMIT)
    decoder.feed(encode_header(Kind.STDOUT, LIMIT + 1) + garbage)
    with pytest.raises(ProtocolError):
        next(decoder)
    with pytest.raises(ProtocolError):
        decoder.feed(more)
    with pytest.raises(ProtocolError):
        next(decoder)
    assert decoder.buffered_bytes == 0


@pytest.mark.parametrize("kind", sorted(FROM_DAEMON - FROM_RUNNER))
def test_frames_of_the_other_direction_are_refused(kind: Kind) -> None:
    """The daemon takes no request, and no unknown kind, from a runner."""
    assert decode([encode_frame(kind)]) == ([], True)


@given(requests)
def test_requests_come_back(request: Any) -> None:
    """Every request survives the wire, as ASCII."""
    body = REQUESTS.encode(request)
    assert body.isascii()
    assert REQUESTS.decode(body) == request


@given(st.binary(max_size=30))
def test_a_directory_of_any_bytes_comes_back(name: bytes) -> None:
    """A surrogate-escaped path in an answer survives the wire."""
    cwd = "/" + name.decode("utf-8", "surrogateescape")
    reply = ExecReply("x", 0, None, "exited", cwd, 1, shell_restarted=False)
    assert ANSWERS.decode(ANSWERS.encode(reply)).cwd.encode("utf-8", "surrogateescape") == b"/" + name


@given(st.binary(max_size=50) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), st.lists)
       .map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_garbage_is_no_message(body: bytes) -> None:
    """Bytes that are no message raise ProtocolError and no other exception; chance may write a message."""
    try:
        message = ANSWERS.decode(body)
    except ProtocolError:
        return
    assert ANSWERS.decode(ANSWERS.encode(message)) == message


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": True},
        {"exit_code": 1.0},
        {"exit_code": "1"},
        {"exit_code": None},
        {"signal": "9"},
        {"cause": "bored"},
        {"shell_restarted": 0},
        {"cwd": None},
        {"extra": 1},
        {"type": "Exec"},
        {"type": 7},
    ],
)
def test_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    """Types are exact and no field is unknown or missing."""
    reply = ExecReply("x", 0, None, "exited", "/", 1, shell_restarted=False)
    body = {"type": "ExecReply", **dataclasses.asdict(reply)}
    assert ANSWERS.decode(json.dumps(body).encode()) == reply
    with pytest.raises(ProtocolError):
        ANSWERS.decode(json.dumps(body | change).encode())
    for name in (field.name for field in dataclasses.fields(reply) if field.default is dataclasses.MISSING):
        with pytest.raises(ProtocolError):
            ANSWERS.decode(json.dumps({key: value for key, value in body.items() if key != name}).encode())


def test_the_classes_of_messages_are_such_as_the_standard_library_makes() -> None:
    """Made by a decorator of ours, which compiles less: each behaves as its fields in a standard frozen dataclass."""
    for cls in {*REQUESTS.classes, *ANSWERS.classes}:
        mine = dataclasses.fields(cls)
        fields = [
            (each.name, each.type, dataclasses.field(**{name: getattr(each, name) for name in KEPT})) for each in mine
        ]
        standard = dataclasses.make_dataclass(cls.__name__, fields, frozen=True, slots=True)
        positional = [f"p{place}" for place, each in enumerate(mine) if _is_needed(each) and not each.kw_only]
        named = {each.name: f"n {each.name}" for each in mine if _is_needed(each) and each.kw_only}
        made, same, expected = cls(*positional, **named), cls(*positional, **named), standard(*positional, **named)
        assert repr(made) == repr(expected)
        assert cls.__match_args__ == standard.__match_args__  # type: ignore[attr-defined]
        assert (made, made != expected, hasattr(made, "__dict__")) == (same, True, False)
        assert _hash(made) == _hash(same) == _hash(expected)
        with pytest.raises(TypeError):
            cls(*positional, "too many", **named, unknown=1)
        for each in mine:
            changed = dataclasses.replace(made, **{each.name: "another"})
            assert (getattr(changed, each.name), changed == made) == ("another", False)
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, each.name, 1)
            with pytest.raises(dataclasses.FrozenInstanceError):
                delattr(made, each.name)
    assert protocol.Setup(shell="bash").env is not protocol.Setup(shell="bash").env


KEPT = ("default", "default_factory", "kw_only")


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _hash(message: object) -> int | None:
    """Return the hash, None of a message with a dict."""
    try:
        return hash(message)
    except TypeError:
        return None
