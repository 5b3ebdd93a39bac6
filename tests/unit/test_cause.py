"""The cause of an end: only what a run did, or shows a sign of, is said of it."""

from __future__ import annotations

import re

import attrs
import pytest

from runner.wire.protocol import Cause as Reported
from runner.wire.protocol import ExecReply
from sandkasten.actors.runs.accounting import Facts, find_cause
from sandkasten.model import Cause, Stream

ALONE = Facts(kills=0, refusals=0, is_alone=True, is_clean=True, was_sent_kill=False)
BESIDE = attrs.evolve(ALONE, is_alone=False)


def reply(exit_code: int, cause: Reported = "exited", *, is_full: bool = False, was_filled: bool = False) -> ExecReply:
    return ExecReply(
        "e", exit_code, None, cause, "/", 1, shell_restarted=False, disk_full=is_full, disk_filled=was_filled
    )


async def cause_of(end: ExecReply, facts: Facts, *, stdout: bytes = b"", stderr: bytes = b"") -> Cause:
    written = {Stream.STDOUT: stdout, Stream.STDERR: stderr}

    async def says(stream: Stream, words: re.Pattern[bytes]) -> bool:
        return words.search(written[stream]) is not None

    return await find_cause(end, facts, says)


@pytest.mark.parametrize("facts", [ALONE, BESIDE])
async def test_without_a_sign_the_runner_s_word_stands(facts: Facts) -> None:
    """A command without a sign of a limit has failed by itself: the runner's cause is kept."""
    assert await cause_of(reply(1), facts) is Cause.EXITED
    assert await cause_of(reply(137, "signalled"), facts) is Cause.SIGNALLED
    assert await cause_of(reply(137, "shell_died"), facts) is Cause.SHELL_DIED


async def test_what_succeeded_or_was_ended_by_us_has_no_other_cause() -> None:
    """A success, or an end by the daemon, keeps its cause whatever the counters and the output say."""
    facts = attrs.evolve(ALONE, kills=1, refusals=1)
    words = b"Killed\nfork: Resource temporarily unavailable\nNo space left on device\n"
    assert await cause_of(reply(0, is_full=True, was_filled=True), facts, stderr=words) is Cause.EXITED
    assert await cause_of(reply(124, "timed_out"), facts, stderr=words) is Cause.TIMED_OUT
    assert await cause_of(reply(130, "cancelled"), facts, stderr=words) is Cause.CANCELLED


async def test_alone_the_session_s_counters_are_the_run_s() -> None:
    """The session's counters decide the cause, however the run failed and whatever it wrote."""
    assert await cause_of(reply(1), attrs.evolve(ALONE, kills=1)) is Cause.OOM
    assert await cause_of(reply(2), attrs.evolve(ALONE, refusals=3)) is Cause.PIDS_LIMIT
    assert await cause_of(reply(1, is_full=True, was_filled=True), ALONE) is Cause.DISK_FULL


async def test_beside_others_the_counters_alone_say_nothing() -> None:
    """Somebody did it; who shows no sign of it did not."""
    facts = attrs.evolve(BESIDE, kills=2, refusals=2)
    assert await cause_of(reply(1, is_full=True, was_filled=True), facts, stderr=b"no such file\n") is Cause.EXITED


@pytest.mark.parametrize(
    "words",
    [
        b"/run/cmd: line 1:    12 Killed                  python3 hog.py\n",
        b"first\nKilled\n",
        b"make: *** [Makefile:2: all] Killed\n",
        b"make: *** [Makefile:2: all] Error 137\n",
        b"x86_64-linux-gnu-gcc: fatal error: Killed signal terminated program cc1\n",
        b"died with <Signals.SIGKILL: 9>.\n",
    ],
)
async def test_a_child_that_was_killed_is_a_sign_of_lack_of_memory(words: bytes) -> None:
    """If the kernel killed meanwhile; and not where it may be the death of a job of an earlier command."""
    facts = attrs.evolve(BESIDE, kills=1)
    assert await cause_of(reply(1), facts, stderr=words) is Cause.OOM
    assert await cause_of(reply(2), facts, stdout=words) is Cause.OOM
    assert await cause_of(reply(1), attrs.evolve(facts, is_clean=False), stderr=words) is Cause.EXITED
    assert await cause_of(reply(1), BESIDE, stderr=words) is Cause.EXITED


async def test_a_death_by_sigkill_is_a_sign_unless_a_caller_sent_it() -> None:
    """Of a program, of a command's last child, and of the shell."""
    facts = attrs.evolve(BESIDE, kills=1, is_clean=False)
    for cause in ("exited", "signalled", "shell_died"):
        assert await cause_of(reply(137, cause), facts) is Cause.OOM
    assert await cause_of(reply(137, "signalled"), attrs.evolve(facts, was_sent_kill=True)) is Cause.SIGNALLED


@pytest.mark.parametrize(
    "words",
    [
        b"/run/cmd: fork: retry: Resource temporarily unavailable\n",
        b"dash: 0: /run/cmd: Cannot fork\n",
        b"sh: can't fork: Resource temporarily unavailable\n",
        b"RuntimeError: can't start new thread\n",
        b"fork/exec /bin/true: resource temporarily unavailable\n",
        b"Error: spawn ls EAGAIN\n",
        b"java.lang.OutOfMemoryError: unable to create native thread: possibly out of memory\n",
    ],
)
async def test_a_fork_that_was_refused_is_a_sign_of_the_pids_limit(words: bytes) -> None:
    """If the limit refused one meanwhile."""
    facts = attrs.evolve(BESIDE, refusals=1)
    assert await cause_of(reply(1), facts, stderr=words) is Cause.PIDS_LIMIT
    assert await cause_of(reply(1), facts, stdout=words) is Cause.PIDS_LIMIT
    assert await cause_of(reply(1), BESIDE, stderr=words) is Cause.EXITED
    assert await cause_of(reply(254), facts) is Cause.PIDS_LIMIT


@pytest.mark.parametrize("words", [b"head: write error: No space left on device\n", b"cp: x: Disk quota exceeded\n"])
async def test_no_room_is_said_on_standard_error_or_is_still_so(words: bytes) -> None:
    """Room that was made again takes nothing back; the same words in ordinary output are a sign only of a full disk."""
    assert await cause_of(reply(1), BESIDE, stderr=words) is Cause.DISK_FULL
    assert await cause_of(reply(1), ALONE, stdout=words) is Cause.EXITED
    assert await cause_of(reply(1, is_full=True), BESIDE, stdout=words) is Cause.DISK_FULL


async def test_a_disk_that_was_full_before_says_nothing() -> None:
    """A disk that somebody else may have filled says nothing, either."""
    assert await cause_of(reply(1, is_full=True), ALONE) is Cause.EXITED
    assert await cause_of(reply(1, is_full=True, was_filled=True), BESIDE) is Cause.EXITED
