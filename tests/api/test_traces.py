"""Trace contexts over HTTP and WebSockets: joined, answered, in the log and in the record of a run."""

from __future__ import annotations

import logging
import re

import pytest

from sandkasten.model import SessionSpec
from tests.api.harness import running_front
from tests.waiting import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
GOOD = f"00-{TRACE}-b7ad6b7169203331-01"
ANSWER = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@pytest.mark.parametrize("path", ["/healthz", "/v1/sessions", "/nowhere", "/v1/sessions/0123456789abcdef/execs"])
async def test_every_answer_names_its_place_in_the_trace(path: str) -> None:
    """Of both halves of the front, refusals included."""
    async with running_front() as running, running.client() as client:
        joined = ANSWER.fullmatch((await client.get(path, headers={"traceparent": GOOD})).headers["traceresponse"])
        assert joined is not None
        assert (joined[1], joined[3]) == (TRACE, "01")
        assert joined[2] != "b7ad6b7169203331"


@pytest.mark.parametrize("given", [[], ["nonsense"], [GOOD.upper()], [GOOD, GOOD], [GOOD[:-1] + "\xe9"]])
async def test_no_trace_that_can_be_joined_begins_one_and_is_no_error(given: list[str]) -> None:
    """Absent, malformed, given twice."""
    async with running_front() as running, running.client() as client:
        headers = [(b"traceparent", value.encode("latin-1")) for value in given]
        answer = await client.get("/v1/sessions", headers=headers)
        assert answer.status_code == 200
        begun = ANSWER.fullmatch(answer.headers["traceresponse"])
        assert begun is not None
        assert (begun[1] != TRACE, begun[3]) == (True, "00")


async def test_the_line_of_a_request_has_the_span_of_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A holder of an answer finds the log, and a recorder of spans finds the parent."""

    async def is_logged() -> bool:
        return any(record.message == "request" for record in caplog.records)

    async with running_front() as running, running.client() as client:
        with caplog.at_level(logging.INFO, "sandkasten"):
            answer = await client.get("/v1/sessions", headers={"traceparent": GOOD})
            await until(is_logged)
        line = next(record.__dict__ for record in caplog.records if record.message == "request")
        assert line["span_id"] == answer.headers["traceresponse"].split("-")[2]
        assert line["parent_id"] == "b7ad6b7169203331"


async def test_a_run_keeps_the_trace_it_began_in() -> None:
    """A run's record names the trace of the request that began the run, whichever request asks for it later."""
    async with running_front() as running, running.client() as client:
        session = await running.supervisor.create(SessionSpec())
        path = f"/v1/sessions/{session.id}"
        begun = {"cmd": "true", "exec_id": "mine"}
        answer = await client.post(f"{path}/exec", json=begun, headers={"traceparent": GOOD})
        assert answer.status_code == 200
        assert (await client.get(f"{path}/execs/mine")).json()["trace_id"] == TRACE
