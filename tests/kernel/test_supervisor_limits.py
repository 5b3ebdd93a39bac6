"""Limits as callers meet them: changed while a hog runs, refused whole, kept over a restart, told by the stats."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, FaultSettings, Maximum
from sandkasten.errors import BuildInterrupted, InvalidRequest, LimitInUse
from sandkasten.model import Cause, ExecSpec, Limits, SessionPatch, SessionSpec, SessionStats
from tests.waiting import until

START = Limits(cpu=1.0, memory_mb=160, pids=64)
HOLD = 'python3 -c \'held = bytearray(96 << 20); open("/tmp/held", "w"); import signal; signal.pause()\' &'
_WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "cpu": (math.nan, math.inf, -1.0, 0, 1e300, "1", True, None),
    "memory_mb": (math.nan, -1, 0, 2**63, 64.5, "64", None),
    "pids": (-1, 0, 2**31, 16.0, True, []),
}
WRONG = [{name: value} for name, values in _WRONG_VALUES.items() for value in values]


def _in_force(stats: SessionStats) -> tuple[object, ...]:
    return stats.memory_limit, stats.pids_limit, stats.cpu_limit


async def test_limits_change_while_a_hog_runs_or_stay_as_they_are(supervisor: LocalSupervisor) -> None:
    """Lower than the hog's memory: refused, record and kernel unchanged. Raised: there is room for a bigger one."""
    session = await supervisor.create(SessionSpec(limits=START))
    await supervisor.exec(session.id, ExecSpec(HOLD))

    async def is_held() -> bool:
        return ((await supervisor.stats(session.id)).memory_bytes or 0) > 96 << 20

    await until(is_held)
    before = await supervisor.stats(session.id)
    patch = SessionPatch(ttl_s=77, limits=attrs.evolve(START, memory_mb=48, pids=20))
    with pytest.raises(LimitInUse) as refused:
        await supervisor.update(session.id, patch)
    assert refused.value.details["memory_mb"] == 48
    found = await supervisor.get(session.id)
    assert (found.limits, found.ttl_s) == (session.limits, session.ttl_s)
    assert _in_force(await supervisor.stats(session.id)) == _in_force(before)

    second = ExecSpec("python3 -c 'x = bytearray(180 << 20)'")
    assert (await supervisor.exec(session.id, second)).end.cause is Cause.OOM
    raised = attrs.evolve(START, memory_mb=320, pids=20, cpu=0.5)
    assert (await supervisor.update(session.id, SessionPatch(limits=raised))).limits.memory_mb == 320
    await supervisor.exec(session.id, ExecSpec(HOLD))
    assert (await supervisor.exec(session.id, second)).end.exit_code == 0
    after = await supervisor.stats(session.id)
    assert _in_force(after) == (320 << 20, 20, 0.5)
    assert (after.oom_kills or 0) >= 1
    assert (after.memory_peak_bytes or 0) > 160 << 20


async def test_a_change_that_no_process_lives_to_make_may_be_tried_again(config: Config) -> None:
    """A change of limits whose helper died fails as an interrupted build; the limits on record stay as they were."""
    testing = FaultSettings(crash_points=True, crash_at="cgroup_maker.raise_limits")
    async with open_supervisor(attrs.evolve(config, testing=testing)) as supervisor:
        session = await supervisor.create(SessionSpec(limits=START))
        with pytest.raises(BuildInterrupted):
            await supervisor.update(session.id, SessionPatch(limits=attrs.evolve(START, memory_mb=320)))
        assert (await supervisor.get(session.id)).limits == session.limits


async def test_wrong_limits_are_refused_and_nothing_changes(supervisor: LocalSupervisor) -> None:
    """A limit that is no number, negative, huge, or of another type is refused with the name of its field, at create
    and at change.
    """
    session = await supervisor.create(SessionSpec(limits=START))
    before = await supervisor.stats(session.id)
    for wrong in WRONG:
        limits = attrs.evolve(START, **wrong)
        for refused in (
            supervisor.update(session.id, SessionPatch(ttl_s=77, limits=limits)),
            supervisor.create(SessionSpec(limits=limits)),
        ):
            with pytest.raises(InvalidRequest) as error:
                await refused
            assert list(error.value.details) == [f"limits.{name}" for name in wrong]
    found = await supervisor.get(session.id)
    assert (found.limits, found.ttl_s) == (session.limits, session.ttl_s)
    assert _in_force(await supervisor.stats(session.id)) == _in_force(before)
    assert len(await supervisor.list(ended=True)) == 1


async def test_an_adopted_session_has_the_limits_it_was_changed_to(config: Config) -> None:
    """An adopted session has its changed limits on record and in the kernel."""
    async with open_supervisor(attrs.evolve(config, sessions_on_stop="keep")) as supervisor:
        session = await supervisor.create(SessionSpec(limits=START))
        changed = attrs.evolve(session.limits, cpu=1 / 3, memory_mb=96, pids=33)
        await supervisor.update(session.id, SessionPatch(limits=changed))
    async with open_supervisor(config) as supervisor:
        assert (await supervisor.get(session.id)).limits == changed
        assert _in_force(await supervisor.stats(session.id)) == (96 << 20, 33, 0.33333)


_OPEN_ALL = """
import errno, os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
opened = []
try:
    while len(opened) < 5000:
        opened.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(soft, hard, errno.errorcode[error.errno], 2000 < len(opened) < 2048)
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard + 1))
except (ValueError, PermissionError):
    print("no more")
"""
_FILL = """
import errno, os, sys
directory, count = sys.argv[1], 0
try:
    while count < 500:
        os.close(os.open(f"{directory}/{count}", os.O_CREAT | os.O_WRONLY))
        count += 1
except OSError as error:
    print(errno.errorcode[error.errno], count < 100)
for number in range(count):
    os.unlink(f"{directory}/{number}")
try:
    with open(f"{directory}/big", "wb", buffering=0) as file:
        while file.tell() < 64 << 20:
            file.write(bytes(1 << 16))
except OSError as error:
    print(errno.errorcode[error.errno], os.stat(f"{directory}/big").st_size >> 20)
"""


@pytest.mark.parametrize("pool_sandboxes", [0, 1])
async def test_open_files_and_places_in_memory_end_where_they_were_asked_to(
    config: Config, pool_sandboxes: int
) -> None:
    """Open files and tmpfs sizes end with EMFILE and ENOSPC at the limits asked for, in a sandbox made at once and in a
    prepared one; and they can't be changed.
    """
    asked = attrs.evolve(START, open_files=2048, tmp_mb=5, tmp_inodes=100, shm_mb=3, shm_inodes=90)
    server = attrs.evolve(config.server, pool_sandboxes=pool_sandboxes)
    async with open_supervisor(attrs.evolve(config, server=server)) as supervisor:
        session = await supervisor.create(SessionSpec(limits=asked))
        assert session.limits == asked
        opened = await supervisor.exec(session.id, ExecSpec(f"python3 -c '{_OPEN_ALL}'"))
        assert opened.output.decode() == "1024 2048 EMFILE True\nno more\n"
        for directory, size_mb in (("/tmp", 5), ("/dev/shm", 3)):
            filled = await supervisor.exec(session.id, ExecSpec(f"python3 -c '{_FILL}' {directory}"))
            assert filled.output.decode() == f"ENOSPC True\nENOSPC {size_mb}\n"
        with pytest.raises(InvalidRequest) as refused:
            await supervisor.update(session.id, SessionPatch(limits=attrs.evolve(asked, open_files=4096, pids=9)))
        assert list(refused.value.details) == ["limits.open_files"]
        assert (await supervisor.get(session.id)).limits == asked
        changed = await supervisor.update(session.id, SessionPatch(limits=attrs.evolve(START, pids=70)))
        assert changed.limits == attrs.evolve(asked, pids=70)


async def test_a_maximum_of_the_operator_holds_for_creates_and_changes(config: Config) -> None:
    """Limits above the operator's maximum are refused, and nothing is made or changed."""
    maximum = Maximum(mem_limit_mb=1024, open_files_limit=65_536)
    async with open_supervisor(attrs.evolve(config, maximum=maximum)) as supervisor:
        session = await supervisor.create(SessionSpec(limits=START))
        above = attrs.evolve(START, memory_mb=1025)
        for refused in (
            supervisor.create(SessionSpec(limits=above)),
            supervisor.update(session.id, SessionPatch(limits=above)),
        ):
            with pytest.raises(InvalidRequest) as error:
                await refused
            assert list(error.value.details) == ["limits.memory_mb"]
        assert [each.limits for each in await supervisor.list(ended=True)] == [session.limits]
