"""The pure parts of nsinit: checks of names and numbers, struct layouts, id ranges, steps, jobs, log lines."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsinit.kernel import syscalls
from nsinit.kernel.slots import parse_subordinate_ids
from nsinit.log import MAX_LINE_BYTES, log
from nsinit.scheduler import Job, JobEvent, Scheduler, Wait
from nsinit.server.requests import LIST_BATCH
from nsinit.steps import StepFailed, Steps, failure_of
from nsinit.storage import loop_device
from nsinit.wire import validate
from nsinit.wire.protocol import (
    ANSWERS,
    MAX_DATAGRAM_BYTES,
    REQUESTS,
    Build,
    Failed,
    Found,
    Identity,
    Limits,
    ProtocolError,
    SandboxPlan,
    Scanned,
    TornDown,
)

ROOT = Path(__file__).parents[2]
PLAN = SandboxPlan("0123456789abcdef", "host", "host", Limits(1 << 28, 64, 100_000))


def test_structs_have_the_kernels_sizes() -> None:
    """clone_args as of 5.7, open_how and mount_attr in their first version."""
    sizes = [ctypes.sizeof(each) for each in (syscalls.CloneArgs, syscalls.OpenHow, syscalls.MountAttr)]
    assert sizes == [88, 24, 32]


def test_errors_are_of_the_fitting_subclass_and_name_the_call() -> None:
    """A missing path is a FileNotFoundError that says which call on what."""
    with pytest.raises(FileNotFoundError, match="openat2") as caught:
        syscalls.openat2(-100, "/no/such/path", os.O_PATH)
    assert caught.value.filename == "/no/such/path"


@given(st.text(max_size=40))
def test_a_name_that_passes_is_one_harmless_path_component(text: str) -> None:
    """Any text that a check lets through stays in a directory when it is joined to its path."""
    for check in (validate.check_session_id, validate.check_workspace_id):
        try:
            check(text)
        except validate.InvalidName:
            continue
        assert os.path.normpath(f"/a/{text}") == f"/a/{text}"
        assert text.isascii()


@pytest.mark.parametrize("bad", ["", "0" * 15, "0" * 33, "0123456789abcdeF", "0123456789abcde\n", "../../../../etc"])
def test_session_ids_are_16_to_32_lower_hex_digits(bad: str) -> None:
    """All other text is refused."""
    assert not validate.is_session_id(bad)
    with pytest.raises(validate.InvalidName, match="session id"):
        validate.check_session_id(bad)


@pytest.mark.parametrize("bad", ["", "relative", "/", "/a/../b", "/a//b", "/a/", "/a/.", "/a\0b"])
def test_the_data_directory_is_absolute_and_normalised(bad: str) -> None:
    """nsinit builds all its paths from it."""
    with pytest.raises(validate.InvalidName):
        validate.check_data_dir(bad)


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": 1024},
        {"memory_bytes": 1 << 60},
        {"pids": 1},
        {"cpu_quota_us": 999},
        {"cpu_period_us": 1_000_001},
    ],
)
def test_limits_the_kernel_would_refuse_are_refused_first(change: dict[str, int]) -> None:
    """With the name of the bad one."""
    validate.check_limits(PLAN.limits)
    with pytest.raises(validate.InvalidName, match=next(iter(change))):
        validate.check_plan(replace(PLAN, limits=replace(PLAN.limits, **change)))


@given(st.builds(TornDown, st.integers(), st.text(), st.integers(), st.integers(), st.integers(), st.tuples(st.text())))
def test_answers_survive_the_wire(message: TornDown) -> None:
    """decode(encode(x)) is x, for any text and number."""
    assert ANSWERS.decode(ANSWERS.encode(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(data: bytes) -> None:
    """No bytes make the decoder of requests do anything but refuse, unless chance has written a request."""
    try:
        message = REQUESTS.decode(data)
    except ProtocolError:
        return
    assert REQUESTS.decode(REQUESTS.encode(message)) == message


def test_a_plan_with_a_field_too_many_is_refused() -> None:
    """A plan can't smuggle a path in."""
    body = json.loads(REQUESTS.encode(Build(1, PLAN)))
    body["plan"]["rootfs"] = "/etc"
    with pytest.raises(ProtocolError, match="rootfs"):
        REQUESTS.decode(json.dumps(body).encode())


def test_a_batch_of_a_scan_says_whether_more_follow() -> None:
    """`more` is off unless said."""
    assert ANSWERS.decode(ANSWERS.encode(Scanned(1, ()))).more is False


def test_a_full_batch_of_a_scan_fits_into_a_datagram() -> None:
    """Even if every number in it is as long as it gets."""
    identity = Identity(pid=1 << 22, start_ticks=1 << 62, pid_ns=1 << 32, base_uid=1 << 32)
    batch = (Found("f" * 32, identity, has_cgroup=False, has_files=False),) * LIST_BATCH
    assert len(ANSWERS.encode(Scanned(1 << 53, batch, more=False))) < MAX_DATAGRAM_BYTES


def test_subordinate_id_ranges_are_read_and_noise_is_skipped() -> None:
    """subuid(5): name, start, count."""
    text = "alice:100000:65536\n# comment\nbroken:x:1\nbob:524288:131072\n"
    assert parse_subordinate_ids(text) == ((100000, 165536), (524288, 655360))


def test_a_failing_step_names_itself_its_path_and_errno() -> None:
    """Steps before it are timed, it isn't."""
    steps = Steps()
    with steps.step("first"):
        pass
    with pytest.raises(StepFailed) as caught, steps.step("second"):
        os.mkdir("/proc/no/such")
    failed = caught.value
    assert (failed.stage, failed.path, failed.errno) == ("second", "/proc/no/such", 2)
    assert list(steps.timings_us) == ["first"]


@pytest.mark.parametrize("error", [ValueError(), AssertionError(), OSError(), OSError(5, "", "/x"), ValueError("why")])
def test_a_failure_always_has_a_sentence(error: Exception) -> None:
    """An exception without a text is named by its class, so that no answer and no line of the log says nothing."""
    assert str(failure_of("step", error))


def test_a_failure_inside_a_step_of_a_step_keeps_the_inner_name() -> None:
    """The innermost step is the one to look at."""
    with pytest.raises(StepFailed) as caught, Steps().step("outer"), Steps().step("inner"):
        raise ValueError("bad")
    assert (caught.value.stage, str(caught.value)) == ("inner", "bad")


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.close()


def _run(scheduler: Scheduler) -> None:
    while scheduler.jobs:
        scheduler.round(1.0)


def test_jobs_wait_for_events_descriptors_and_time(scheduler: Scheduler) -> None:
    """True for what happened, False for what did not in time."""
    read_fd, write_fd = os.pipe()
    event, answers = JobEvent(), []

    def waits(name: str, wait: Wait) -> Job:
        answers.append((name, (yield wait)))

    def acts() -> Job:
        event.set()
        os.write(write_fd, b"x")
        return
        yield Wait()

    scheduler.spawn(waits("event", Wait(event=event)))
    scheduler.spawn(waits("fd", Wait(fd=read_fd, timeout_s=10)))
    scheduler.spawn(waits("never", Wait(event=JobEvent(), timeout_s=0.01)))
    scheduler.spawn(waits("pause", Wait(timeout_s=0.001)))
    scheduler.spawn(acts())
    _run(scheduler)
    assert dict(answers) == {"event": True, "fd": True, "never": False, "pause": False}
    os.close(read_fd)
    os.close(write_fd)


def test_a_job_that_timed_out_is_not_woken_again(scheduler: Scheduler) -> None:
    """The descriptor it waited for is no longer watched, and a late event changes nothing: it knows of nobody."""
    read_fd, write_fd = os.pipe()
    event, answers = JobEvent(), []

    def waits() -> Job:
        answers.append((yield Wait(fd=read_fd, event=event, timeout_s=0.001)))
        answers.append((yield Wait(timeout_s=0.02)))

    scheduler.spawn(waits())
    while not answers:
        scheduler.round(1.0)
    assert not event.waiters
    event.set()
    os.write(write_fd, b"x")
    _run(scheduler)
    assert answers == [False, False]
    os.close(read_fd)
    os.close(write_fd)


def test_an_event_that_already_happened_is_not_waited_for(scheduler: Scheduler) -> None:
    """Even without a time limit."""
    event, answers = JobEvent(), []
    event.set()

    def waits() -> Job:
        answers.append((yield Wait(event=event)))

    scheduler.spawn(waits())
    _run(scheduler)
    assert answers == [True]


def test_a_log_nobody_reads_never_blocks() -> None:
    """Lines are JSON; when the pipe is full they are dropped."""
    read_fd, write_fd = os.pipe()
    saved_fd = os.dup(2)
    os.dup2(write_fd, 2)
    try:
        log("info", "first", "0123456789abcdef", reason="x" * 10_000)
        for _ in range(1000):
            log("info", "again", number=1)
    finally:
        os.dup2(saved_fd, 2)
        os.close(saved_fd)
        os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        lines = pipe.read().splitlines()
    assert len(lines[0]) < MAX_LINE_BYTES
    assert json.loads(lines[0])["event"] == "first"
    assert json.loads(lines[1]) == {"level": "info", "logger": "nsinit", "event": "again", "number": 1}


def test_a_failure_on_the_wire_keeps_stage_path_and_errno() -> None:
    """The child's failure reaches the daemon as it is."""
    failed = Failed(7, "overlay root", "/x", 2, "no such file")
    assert ANSWERS.decode(ANSWERS.encode(failed)) == failed


def test_a_loop_device_that_goes_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    """The kernel takes the attribute away with the file, and a read of an open one fails then."""
    for name in ("loop1", "loop2", "loop3", "sda"):
        (tmp_path / name / "loop").mkdir(parents=True)
    (tmp_path / "loop1/loop/backing_file").symlink_to("/proc/self/mem")  # can be opened, and not be read from 0 on
    (tmp_path / "loop3/loop/backing_file").write_text("/images/x (deleted)\n")
    blocks_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert list(loop_device.backed(blocks_fd)) == [(3, "/images/x")]
    finally:
        os.close(blocks_fd)


WITH_THREADS = """
import threading
from nsinit.tools import drop
drop.THREADS_END_S, end = 0.5, threading.Event()
for thread in (threading.Timer(0.05, print, ("ended",)), threading.Thread(target=end.wait, daemon=True)):
    thread.start()
    try:
        drop.wait_alone()
    except drop.NotDropped as error:
        print(error)
"""


def test_root_is_given_away_once_the_last_other_thread_has_ended() -> None:
    """A thread on its way out is waited for, and one that stays is refused."""
    done = subprocess.run([sys.executable, "-c", WITH_THREADS], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == ["ended", "there is more than one thread"]
