"""Trials of the machine: a trial that kills or blocks its process fails alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nsinit.tools.trials import attempt as trials
from nsinit.tools.trials.attempt import Answer, FallsBack, Room, Seen, Trial, attempt


def fine(_room: Room) -> Seen:
    return Seen("done", {"pid": os.getpid()})


def refused(_room: Room) -> str:
    raise PermissionError(1, "not for you")


def lesser(_room: Room) -> str:
    raise FallsBack("another way", kind=2)


def deadly(_room: Room) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def endless(_room: Room) -> str:
    signal.pause()
    return "never"


def try_all(trials: dict[str, Trial], path: Path) -> dict[str, Answer]:
    return attempt(trials, Room(str(path), is_thorough=False))


def test_answers_say_what_was_seen_and_which_call_failed(tmp_path: Path) -> None:
    """Trials are made one after the other, in one process that is not ours; answers name what was seen and the call
    that failed.
    """
    answers = try_all({"a": fine, "b": refused, "c": lesser, "d": fine}, tmp_path)
    assert list(answers) == ["a", "b", "c", "d"]
    assert answers["a"] == answers["d"]
    assert answers["a"]["facts"] != {"pid": os.getpid()}
    assert answers["b"] == {"verdict": "missing", "seen": "[Errno 1] not for you", "errno": 1, "facts": {}}
    assert answers["c"] == {"verdict": "falls_back", "seen": "another way", "errno": 0, "facts": {"kind": 2}}


def test_one_that_kills_its_process_takes_nobody_along(tmp_path: Path) -> None:
    """Trials behind the one that killed its process are made in other processes."""
    answers = try_all({"a": fine, "b": deadly, "c": fine}, tmp_path)
    assert [answers[name]["verdict"] for name in "abc"] == ["works", "missing", "works"]
    assert answers["b"]["seen"] == "the trial's process was killed by SIGKILL"


def test_one_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that never ends is given up, and its process is killed."""
    monkeypatch.setattr(trials, "TIMEOUT_S", 0.3)
    answers = try_all({"a": endless, "b": fine}, tmp_path)
    assert [answers[name]["verdict"] for name in "ab"] == ["missing", "works"]
    assert answers["a"]["seen"] == "no answer within 0.3 s"
