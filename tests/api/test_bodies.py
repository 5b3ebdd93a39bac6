"""JSON bodies: their largest size by route, and that a large one costs nobody else their turn."""

from __future__ import annotations

import base64
import json

import pytest
import trio

from sandkasten.api.http.json import MAX_VALUES, SLICE_BYTES, check_value_count
from sandkasten.api.http.settings import MIB, ApiSettings
from sandkasten.errors import InvalidRequest
from sandkasten.model import ProcessSpec, SessionSpec
from tests.api.harness import running_front
from tests.fakes.runner import Script


def test_the_limit_of_a_request_follows_from_that_of_a_command() -> None:
    """As JSON, a command of two-byte characters is three times as long; contents have a limit of their own."""
    assert ApiSettings(max_command_bytes=MIB).max_request_bytes == 4 * MIB
    assert ApiSettings(max_command_bytes=1024).max_request_bytes == MIB + 3072
    assert ApiSettings(max_command_bytes=MIB, max_json_bytes=2 * MIB).max_request_bytes == 2 * MIB


async def test_only_contents_may_be_larger_than_a_request() -> None:
    """fs/write and stdin take 5 MiB, no other route does, and says what it takes."""
    async with running_front() as running, running.client() as client:
        url = f"/v1/sessions/{(await running.supervisor.create(SessionSpec())).id}"
        running.tree.scripts["cat"] = Script(hold=trio.Event())
        await client.post(f"{url}/processes", json={"cmd": "cat", "process_id": "p"})
        fields = {"text": "x" * 5 * MIB, "path": "x"}
        assert (await client.post(f"{url}/fs/write", json=fields)).status_code == 200
        body = json.dumps({**fields, "cmd": "true", "name": "x", "signal": 1}).encode()
        for rest in ("execs/p/stdin", "processes/p/stdin"):
            assert (await client.post(f"{url}/{rest}", content=body)).status_code == 200, rest
        for path in (
            "/v1/sessions",
            f"{url}/exec",
            f"{url}/exec/stream",
            f"{url}/shells",
            f"{url}/processes",
            f"{url}/processes/p/wait",
            f"{url}/execs/p/signal",
            f"{url}/execs/p/cancel",
            f"{url}/execs/p/resize",
        ):
            answer = await client.post(path, content=body)
            assert (answer.status_code, answer.json()["error_code"]) == (413, "TOO_LARGE"), path
            assert answer.json()["details"] == {"max_body_bytes": 4 * MIB}
        for path in (f"{url}/execs/p/stream", f"{url}/fs/read?path=x", "/v1/sessions"):
            assert (await client.request("GET", path, content=body)).status_code == 413, path


@pytest.mark.parametrize("command", ["\u0416" * (MIB // 2), '"' * MIB, "x" * MIB, "\n" * MIB])
async def test_the_longest_command_fits(command: str) -> None:
    """However its characters are spelled in JSON."""
    async with running_front() as running, running.client() as client:
        session = await running.supervisor.create(SessionSpec())
        running.tree.scripts[command] = Script()
        body = json.dumps({"cmd": command, "env": {"A": "\u0416" * 60_000}}).encode()
        assert (await client.post(f"/v1/sessions/{session.id}/exec", content=body)).status_code == 200


MANY = {
    "arrays": b"[" + b"[]," * MAX_VALUES + b"[]]",
    "numbers": b"[" + b"1," * MAX_VALUES + b"1]",
    "strings": b"[" + b'"",' * MAX_VALUES + b'""]',
    "members": b"{" + b'"a":1,' * MAX_VALUES + b'"a":1}',
    "depth": b"[" * (MAX_VALUES + 1),
    "quotes": b'"' * (2 * MAX_VALUES + 2),
    "strings of escapes": b"[" + b'"\\\\\\"",' * MAX_VALUES + b"1]",
    "behind a long string": b'["' + b"x" * (SLICE_BYTES * 3 + 1) + b'",' + b"[]," * MAX_VALUES + b"1]",
    "behind a string that ends with a slice": b'["' + b"x" * (SLICE_BYTES - 2) + b'",' + b"[]," * MAX_VALUES + b"1]",
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY.keys())
async def test_too_many_values_are_refused(body: bytes) -> None:
    """Bodies that cost much more to parse than their length says are refused."""
    with pytest.raises(InvalidRequest):
        await check_value_count(body)


LONG = ",[{\n" * 100_000
FEW = {
    "signs within a string": json.dumps([LONG]).encode(),
    "escaped quotes": json.dumps(['",' * 200_000]).encode(),
    "escapes across slices": b'["' + b"\\\\" * (SLICE_BYTES * 2) + b'"]',
    "escapes across slices, shifted": b'[ "' + b"\\\\" * (SLICE_BYTES * 2) + b'"]',
    "escaped quotes across slices": b'["' + b'\\",' * SLICE_BYTES + b'"]',
    "an escape at the end": b'["' + b"x" * MAX_VALUES + b"\\",
    "base64": json.dumps({"content_base64": base64.b64encode(bytes(MIB)).decode()}).encode(),
    "spaces": b" " * MIB,
    "as many as may be": b"[" + b"1," * (MAX_VALUES - 2) + b"1]",
}


@pytest.mark.parametrize("body", FEW.values(), ids=FEW.keys())
async def test_a_long_text_is_not_many_values(body: bytes) -> None:
    """The content of a text is not counted as values, wherever the check cuts the text."""
    await check_value_count(body)


@pytest.mark.parametrize("unit", [b"x", b'\\"', b"\\u0416"])
async def test_others_get_their_turns_while_a_large_body_is_looked_at(unit: bytes) -> None:
    """16 MiB are taken in slices."""
    body = b'{"text":"' + unit * (16 * MIB // len(unit)) + b'"}'
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        await check_value_count(body)
        nursery.cancel_scope.cancel()
    assert turns >= len(body) // SLICE_BYTES - 2


async def test_a_route_refuses_too_many_values() -> None:
    """As a bad body; also where the field would be ignored."""
    body = b'{"cmd":"x","path":"x","text":"x","ignored":' + MANY["arrays"] + b"}"
    async with running_front() as running, running.client() as client:
        session = await running.supervisor.create(SessionSpec())
        await running.supervisor.start_process(session.id, ProcessSpec(command="a", process_id="p"))
        for rest in ("exec", "fs/write", "execs/p/stdin"):
            answer = await client.post(f"/v1/sessions/{session.id}/{rest}", content=body)
            assert (answer.status_code, list(answer.json()["details"])) == (400, ["body"])
        assert (await client.post("/v1/sessions", content=body)).status_code == 400


@pytest.mark.parametrize(("method", "rest"), [("POST", "/exec"), ("POST", "/processes"), ("PATCH", "")])
async def test_the_number_of_variables_is_bounded(method: str, rest: str) -> None:
    """Before their names and values are looked at: the refusal says nothing of a bad name among them."""
    env = {f"a{number}": "" for number in range(4096)}
    async with running_front() as running, running.client() as client:
        session = await running.supervisor.create(SessionSpec())
        running.tree.scripts["a"] = Script()
        url = f"/v1/sessions/{session.id}{rest}"
        assert (await client.request(method, url, json={"cmd": "a", "env": env})).is_success
        answer = await client.request(method, url, json={"cmd": "a", "env": {"bad name": ""} | env})
        assert (answer.status_code, answer.json()["details"]) == (400, {"env": "must not have more than 4096 names"})
