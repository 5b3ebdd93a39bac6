"""Deadlines of tests grow with the slowness of the machine, and only with that."""

from __future__ import annotations

import pytest

from tests import waiting


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle machine that measures anew at each question."""
    monkeypatch.setattr(waiting, "_measured", waiting.Measured())
    monkeypatch.setattr(waiting, "_MEASURED_FOR_S", -1.0)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))


def test_an_idle_machine_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast machine does not shorten a deadline, either."""
    monkeypatch.setattr(waiting, "_sample", lambda: waiting.REFERENCE_S / 5)
    assert waiting.patience(5) == 5 * waiting.SLOWNESS


def test_a_slow_moment_lengthens_what_is_waited_for_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single fast measurement between slow ones changes nothing; two end it."""
    factors = iter((20.0, 1.0, 1.0))
    monkeypatch.setattr(waiting, "SLOWNESS", 1.0)
    monkeypatch.setattr(waiting, "_sample", lambda: waiting.REFERENCE_S * next(factors))
    assert [waiting.slowness() for _ in range(3)] == [waiting.MAX_SLOWNESS, waiting.MAX_SLOWNESS, 1.0]


def test_runnable_processes_count_each_processor_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SLOWNESS", 1.0)
    monkeypatch.setattr(waiting, "_sample", lambda: waiting.REFERENCE_S)
    monkeypatch.setattr("os.getloadavg", lambda: (8.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert waiting.slowness() == 4.0
