"""A campaign: connections of commands and streams are cut at each byte, those of creates at each third, and callers on
asyncio give up at each second turn of the loop. It takes 1.7 minutes of computing.

The tests are those of `test_retries` and `test_bad_servers`, which take samples.
"""

from __future__ import annotations

import pytest

from tests.sdk import test_bad_servers, test_retries
from tests.sdk.test_bad_servers import test_a_caller_on_asyncio_may_give_up_at_any_moment as test_giving_up
from tests.sdk.test_retries import no_long_waits as no_long_waits
from tests.sdk.test_retries import test_a_command_runs_once_wherever_its_connection_is_cut as test_a_command
from tests.sdk.test_retries import test_a_create_makes_one_session_wherever_its_connection_is_cut as test_a_create
from tests.sdk.test_retries import test_a_stream_goes_on_where_its_connection_was_cut as test_a_stream

__all__ = ["no_long_waits", "test_a_command", "test_a_create", "test_a_stream", "test_giving_up"]


@pytest.fixture(autouse=True)
def finer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take more samples."""
    monkeypatch.setattr(test_retries, "FINER", 7)
    monkeypatch.setattr(test_bad_servers, "TURNS", 2)
