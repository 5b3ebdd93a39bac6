"""Every fuzz target, for a bounded time: no input makes anything but a value or the typed refusal."""

from __future__ import annotations

import random
import subprocess
import sys
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz import __main__ as long_run
from tests.fuzz.targets import TARGETS

EXAMPLES = 150
RANDOM_RUNS = 1500
COVERED = ("runner_frames", "api_bodies", "websocket_messages")
COVERED_S = 2
"""Time for each of them."""


@pytest.mark.parametrize("name", TARGETS)
@settings(
    max_examples=EXAMPLES, deadline=None, print_blob=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.binary(max_size=400))
@example(data=b"")
def test_no_input_breaks_a_property(name: str, data: bytes) -> None:
    """Input chosen by hypothesis breaks no property; a failure shows the smallest input and a line that
    reproduces it.
    """
    TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_no_random_input_breaks_a_property(name: str) -> None:
    """Longer random input breaks no property; a failure tells the seed."""
    seed = random.SystemRandom().getrandbits(32)
    assert long_run.run_random(name, seed=seed, runs=RANDOM_RUNS) == RANDOM_RUNS


@pytest.mark.skipif(find_spec("atheris") is None, reason="needs atheris, which has wheels for some machines")
def test_no_input_that_coverage_leads_to_breaks_a_property() -> None:
    """Input of a runner and of a client, chosen by coverage, breaks no property; `make fuzz` covers all targets for
    longer.
    """
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(len(COVERED) * COVERED_S), *COVERED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("no finding")) == (0, len(COVERED)), done.stdout + done.stderr


def test_a_finding_tells_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The seed's input is printed, and reproduces it."""

    def broken(data: bytes) -> None:
        assert len(data) < 100

    with pytest.raises(AssertionError):
        long_run.run_random("broken", seed=7, runs=1000, targets={"broken": broken})
    printed = capsys.readouterr().out
    assert "seed 7" in printed
    with pytest.raises(AssertionError):
        broken(bytes.fromhex(printed.split()[-1]))
