"""E2B's codec, tokens and shapes, without input and output."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from sandkasten import errors
from sandkasten.api.e2b.connect import (
    END,
    HEAD,
    STATUS,
    Code,
    EnvelopeReader,
    base64_bytes,
    base64_text,
    code_of,
    decode_message,
    ending,
    envelope,
    integer,
    spell_error,
    timestamp,
)
from sandkasten.api.e2b.context import Command, Commands, user_of
from sandkasten.api.e2b.interpreter import warm_pools
from sandkasten.api.e2b.process import end_event
from sandkasten.api.e2b.sandboxes import E2bTerms, access_token, find_signer, is_token_of, sign
from sandkasten.config import PoolSize
from sandkasten.errors import InvalidRequest, TooLarge
from sandkasten.model import Cause, ExecEnd, Usage

_KEY = b"k" * 32
_IDS = ["0123456789abcdef01234567", "1123456789abcdef01234567", "2123456789abcdef01234567"]


def _read(pieces: Iterable[bytes], *, max_bytes: int = 1000) -> list[dict[str, Any]]:
    reader = EnvelopeReader(max_bytes)
    bodies = [body for piece in pieces for body in reader.feed(piece)]
    reader.finish()
    return [decode_message(body) for body in bodies]


def test_messages_come_whole_however_their_stream_is_cut() -> None:
    """Two cuts at every pair of bytes change nothing, and a stream that ends within a message is refused."""
    sent: list[dict[str, Any]] = [{"start": {"pid": 1}}, {}, {"data": "é"}]
    stream = b"".join(envelope(each) for each in sent) + ending()
    whole = {0, *(sum(len(envelope(each)) for each in sent[:count]) for count in (1, 2, 3)), len(stream)}
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            assert _read([stream[:first], stream[first:second], stream[second:]]) == sent
        if first not in whole:
            with pytest.raises(InvalidRequest, match="within a message"):
                _read([stream[:first]])


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        pytest.param(HEAD.pack(0, 1001), TooLarge, id="longer than allowed, before any of it came"),
        pytest.param(HEAD.pack(0, 2**32 - 1) + b"{}", TooLarge, id="a lying length"),
        pytest.param(HEAD.pack(1, 2) + b"{}", InvalidRequest, id="compressed"),
        pytest.param(HEAD.pack(0x80, 2) + b"{}", InvalidRequest, id="an unknown flag"),
        pytest.param(HEAD.pack(0, 2) + b"[]", InvalidRequest, id="no object"),
        pytest.param(HEAD.pack(0, 1) + b"{", InvalidRequest, id="no JSON"),
        pytest.param(ending() + envelope({}), InvalidRequest, id="behind the last one"),
    ],
)
def test_a_stream_that_lies_is_refused(stream: bytes, error: type[Exception]) -> None:
    """Bytes that can't be a message raise at once."""
    with pytest.raises(error):
        _read([stream])


def test_the_last_message_says_how_a_stream_ended() -> None:
    """The flag of the end stands on it, with an error or without."""
    for error in (None, {"code": "not_found", "message": "no"}):
        flags, size = HEAD.unpack_from(ending(error))
        body = json.loads(ending(error)[HEAD.size :])
        assert (flags, size, body) == (END, len(ending(error)) - HEAD.size, {} if error is None else {"error": error})


def test_every_code_has_a_status_and_no_internals_get_one_of_their_own() -> None:
    """The table is whole. An error that is not for clients, or none of ours, is internal."""
    assert STATUS.keys() == set(Code)
    assert code_of(errors.FileNotFound("x")) is Code.NOT_FOUND
    assert code_of(errors.Conflict("x")) is Code.ALREADY_EXISTS
    assert code_of(errors.StoreFailed("secret")) is Code.INTERNAL
    assert code_of(RuntimeError("secret")) is Code.INTERNAL


def test_no_room_is_a_status_that_both_clients_repeat() -> None:
    """Capacity is 429 with the time to wait; an error without a text for clients says nothing of itself."""
    full = spell_error(errors.Capacity("full", retry_after_s=7))
    assert (full.status, dict(full.headers)["retry-after"], json.loads(full.body)["code"]) == (429, "7", 429)
    broken = spell_error(RuntimeError("secret"))
    assert (broken.status, b"secret" in broken.body) == (500, False)


def test_values_of_proto_json() -> None:
    """Bytes of either alphabet, padded or not; integers as texts; times in UTC, or none that no calendar has."""
    assert [base64_bytes(text) for text in ("_-8=", "/+8", base64_text(b"\xff\xef"))] == [b"\xff\xef"] * 3
    assert [integer(value) for value in (7, "7", 7.0)] == [7, 7, 7]
    for bad in (True, -1, "x", 7.5, None, 2**32, "1" * 30):
        with pytest.raises(ValueError, match="must be an integer"):
            integer(bad)
    for bad in (7, "ä", "a"):
        with pytest.raises(ValueError, match="base64"):
            base64_bytes(bad)
    assert timestamp(1_000_000) == "1970-01-01T00:00:01.000000Z"
    assert timestamp(2**62) is None


def test_a_user_is_a_name_without_a_proof() -> None:
    """A Basic header names the user; others name none."""
    assert [user_of(text) for text in ("Basic cm9vdDo=", "Basic Og==", "Bearer x", None)] == ["root", None, None, None]
    with pytest.raises(InvalidRequest):
        user_of("Basic ?")


def test_a_token_and_a_signature_are_good_for_one_sandbox() -> None:
    """Another sandbox, key, path, action, user or end makes another one."""
    token = access_token(_KEY, _IDS[1])
    assert is_token_of(_KEY, _IDS[1], token)
    assert not any(is_token_of(_KEY, _IDS[0], each) for each in (token, "", "é" * 64))
    said: dict[str, Any] = {"path": "a b", "action": "read", "user": "", "expiration": "9"}
    signature = sign(token=token, **said)
    assert find_signer(_KEY, _IDS, signature, **said) == _IDS[1]
    for change in ({"path": "a"}, {"action": "write"}, {"user": "root"}, {"expiration": None}, {"expiration": "99"}):
        assert find_signer(_KEY, _IDS, signature, **said | change) is None
    assert find_signer(b"other", _IDS, signature, **said) is None


@pytest.mark.parametrize(
    ("code", "signal", "cause", "event"),
    [
        (0, None, Cause.EXITED, {"exitCode": 0, "exited": True, "status": "exit status 0"}),
        (137, None, Cause.EXITED, {"exitCode": 137, "exited": True, "status": "exit status 137"}),
        (143, 15, Cause.SIGNALLED, {"exitCode": -1, "exited": False, "status": "signal: terminated"}),
        (137, 9, Cause.OOM, {"exitCode": -1, "exited": False, "status": "signal: killed"}),
    ],
)
def test_an_end_in_words_of_e2b(code: int, signal: int | None, cause: Cause, event: dict[str, Any]) -> None:
    """A status that looks like a signal's is none; what the kernel did to a command is said."""
    end = ExecEnd("e", code, signal, cause, "/", 1, None, shell_restarted=False, usage=Usage())
    found = dict(end_event(end))
    error = found.pop("error", None)
    assert found == event
    assert (error is None) == (code == 0)
    assert ("oom" in str(error)) == (cause is Cause.OOM)


def test_commands_are_kept_within_bounds() -> None:
    """The oldest go, and one that is larger than all of it is not kept."""
    kept = Commands(max_bytes=1000)
    for number in range(10):
        kept.keep("s", str(number), Command("x" * 100, (), {}))
    assert [number for number in range(10) if kept.get("s", str(number)) is not None] == [7, 8, 9]
    kept.keep("s", "large", Command("x" * 2000, (), {}))
    assert kept.get("s", "large") is None


@pytest.mark.parametrize(
    ("templates", "warm"),
    [({}, {"code-interpreter-v1"}), ({"code-interpreter-v1": "own", "base": "other"}, {"own", "alias"})],
)
def test_pools_with_a_kernel(templates: dict[str, str], warm: set[str]) -> None:
    """Pools of the image that the template leads to, by any name, with the account of E2B's sandboxes, have one."""
    pools = dict.fromkeys(("code-interpreter-v1", "own", "alias", "other"), PoolSize(1, account="user"))
    terms = E2bTerms(key=_KEY, templates=templates, aliases={"alias": "own", "without": "own"})
    assert set(warm_pools({**pools, "without": PoolSize(1)}, terms)) == warm
