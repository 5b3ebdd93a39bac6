"""Output by offset: nothing lost, nothing twice, no character cut."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from sandkasten.config import RunsSettings
from sandkasten.model import Stream
from tests.api.harness import running_front
from tests.api.test_execs import start
from tests.fakes.runner import Script

MIXED = [(Stream.STDOUT, "aé€😀".encode()), (Stream.STDERR, b"\xff\r\n"), (Stream.STDOUT, b"end")]
WHOLE = b"".join(data for _, data in MIXED)


async def read(client: httpx.AsyncClient, url: str, query: str = "") -> dict[str, Any]:  # JSON values
    answer = await client.get(f"{url}/execs/e-1/output{query}")
    assert answer.status_code == 200
    view: dict[str, Any] = answer.json()
    return view


async def test_both_streams_come_as_they_arrived_or_one_alone() -> None:
    """As text with nothing removed, with all offsets."""
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, Script(MIXED))
        assert await read(client, url) == {
            "text": "aé€😀\ufffd\r\nend",
            "offset": 0,
            "next_offset": 16,
            "first_offset": 0,
            "total_bytes": 16,
            "is_final": True,
        }
        assert (await read(client, url, "?stream=stdout"))["text"] == "aé€😀end"
        assert (await read(client, url, "?stream=stderr&offset=1&limit=1000"))["text"] == "\r\n"


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 100])
async def test_reading_on_from_the_next_offset_gives_all_of_it(limit: int) -> None:
    """However small the parts: text without a cut character, and exact bytes."""
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, Script(MIXED))
        text, offset, is_final = "", 0, False
        while not is_final:
            part = await read(client, url, f"?offset={offset}&limit={limit}")
            assert part["next_offset"] > offset
            assert len(part["text"].encode()) <= max(limit, 4) + 2  # U+FFFD is three bytes for one
            text, offset, is_final = text + part["text"], part["next_offset"], part["is_final"]
        assert text == WHOLE.decode(errors="replace")
        data, offset, is_final = b"", 0, False
        while not is_final:
            part = await read(client, url, f"?offset={offset}&limit={limit}&encoding=base64")
            assert part["next_offset"] - offset <= limit
            data, offset = data + base64.b64decode(part["content_base64"]), part["next_offset"]
            is_final = part["is_final"]
        assert data == WHOLE


async def test_half_a_character_waits_for_its_end() -> None:
    """The next offset lies before it until it is whole, or nothing follows."""
    end = trio.Event()
    async with running_front() as running, running.client() as client:
        url, run = await start(running, client, Script([(Stream.STDOUT, b"a\xe2\x82")], hold=end))
        part = await read(client, url)
        assert (part["text"], part["next_offset"], part["total_bytes"], part["is_final"]) == ("a", 1, 3, False)
        run.write(Stream.STDOUT, b"\xac\xe2")
        await trio.testing.wait_all_tasks_blocked(0.01)
        part = await read(client, url, "?offset=1")
        assert (part["text"], part["next_offset"], part["is_final"]) == ("€", 4, False)
        end.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        part = await read(client, url, "?offset=4")
        assert (part["text"], part["next_offset"], part["is_final"]) == ("\ufffd", 5, True)


async def test_it_never_waits() -> None:
    """At the end of what is there the part is empty, and not final while the run goes on."""
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, Script([(Stream.STDOUT, b"abc")], hold=trio.Event()))
        part = await read(client, url, "?offset=3")
        assert (part["text"], part["next_offset"], part["is_final"]) == ("", 3, False)


async def test_plain_bytes_have_their_offsets_in_headers() -> None:
    """For who asks for octets by name."""
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, Script(MIXED))
        headers = {"Accept": "text/html, application/octet-stream;q=0.9"}
        answer = await client.get(f"{url}/execs/e-1/output?offset=1&limit=6", headers=headers)
        assert (answer.status_code, answer.content) == (200, WHOLE[1:7])
        assert answer.headers["content-type"] == "application/octet-stream"
        names = ("x-offset", "x-next-offset", "x-first-offset", "x-total-bytes", "x-is-final")
        assert [answer.headers[name] for name in names] == ["1", "7", "0", "16", "false"]
        anything = await client.get(f"{url}/execs/e-1/output", headers={"Accept": "*/*"})
        assert anything.headers["content-type"] == "application/json"


async def test_what_is_not_kept_any_more_is_410() -> None:
    """With the offset from which on there is something."""
    size = 60_000
    whole = ("x" * size + "y" * size) * 20
    async with running_front(runs=RunsSettings(keep_mb=1)) as running, running.client() as client:
        script = Script([(Stream.STDOUT, b"x" * size), (Stream.STDERR, b"y" * size)], repeat=20)
        url, _ = await start(running, client, script)
        assert (
            await client.post(f"{url}/execs/e-1/wait", json={"for": "exit"})
        ).status_code == 200  # what is kept moves until then
        answer = await client.get(f"{url}/execs/e-1/output")
        assert (answer.status_code, answer.json()["error_code"], list(answer.json()["details"])) == (
            410,
            "EXEC_GONE",
            ["first_offset"],
        )
        first = answer.json()["details"]["first_offset"]
        part = await read(client, url, f"?offset={first}&limit={len(whole)}")
        assert (part["text"], part["first_offset"], part["total_bytes"]) == (whole[first:], first, len(whole))
        assert 0 < first < len(whole)


async def test_a_large_part_is_decoded_in_slices() -> None:
    """With a character across each boundary."""
    data = b"a" + "é".encode() * 200_000
    async with running_front() as running, running.client() as client:
        url, _ = await start(running, client, Script([(Stream.STDOUT, data)]))
        assert (await read(client, url))["text"] == data.decode()
