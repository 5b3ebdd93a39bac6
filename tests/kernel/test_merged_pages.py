"""Merging of pages: PID 1 of a session offers its own, and nothing else in the session does."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import attrs
import pytest

from bench.measure import KSM, merging
from runner.wire.protocol import WatchFiles
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, IsolationSettings
from sandkasten.model import ExecSpec, ProcessSpec, Session, SessionSpec, ShellSpec, TerminalSpec
from tests.allowance import ALLOWANCE
from tests.kernel.harness import ROOMY, Nsinit, Sandbox, data_directory, host_plan, running, wait_until
from tests.kernel.processes import init_pid
from tests.leaks import descendants

needs_ksm = pytest.mark.skipif(not KSM.exists(), reason="this kernel can't merge pages (CONFIG_KSM)")

ASK = "grep -e merge_any -e mergeable /proc/self/ksm_stat; grep -c ' mg' /proc/self/smaps"
"""The kernel's word about the process that asks, and the number of its areas with the mark; grep then exits with 1."""


def offers_pages(pid: int) -> bool:
    """Return whether any memory of a process may be merged: by a mark of the area, or of the whole process."""
    try:
        stat = Path(f"/proc/{pid}/ksm_stat").read_text()  # Linux 6.1 or newer
        areas = Path(f"/proc/{pid}/smaps").read_text()
    except FileNotFoundError:
        return False
    flags = (line.split()[1:] for line in areas.splitlines() if line.startswith("VmFlags:"))
    return "ksm_merge_any: yes" in stat or any("mg" in each for each in flags)


def processes_of(session: Session) -> set[int]:
    """Return the processes of a session but PID 1."""
    pid_1 = init_pid(session)
    return {pid for pid, _ in descendants(pid_1) if pid != pid_1}


@pytest.fixture
def merged_config(config: Config) -> Config:
    return attrs.evolve(config, isolation=IsolationSettings(merge_pages=True))


@needs_ksm
async def test_no_foreign_program_offers_pages(merged_config: Config) -> None:
    """PID 1 does; commands, runs beside the shell, named shells, terminals, background processes and file workers do
    not, as the machine sees them and as they see themselves."""
    async with open_supervisor(merged_config) as supervisor:
        session = await supervisor.create(SessionSpec())
        assert offers_pages(init_pid(session))
        await supervisor.open_shell(session.id, ShellSpec("other"))
        for place in ({}, {"stateless": True}, {"shell": "other"}, {"user": "root", "stateless": True}):
            said = await supervisor.exec(session.id, ExecSpec(command=ASK, **place))
            assert b"yes" not in said.output, place
            assert said.output.split()[-1:] == [b"0"], place
        await supervisor.start_process(session.id, ProcessSpec(argv=("sleep", "60")))
        async with (
            supervisor.open_terminal(session.id, TerminalSpec()) as viewer,
            supervisor.files(session.id).stream(WatchFiles("/workspace")) as watch,
        ):
            await viewer.send(f"{ASK}\r".encode())
            await anext(aiter(viewer))
            await watch.head(object)
            seen = processes_of(session)
            assert len(seen) >= 5, "two shells, a process, a terminal's shell, a file worker"
            assert not {pid for pid in seen if offers_pages(pid)}


@needs_ksm
async def test_pages_are_offered_only_where_that_was_asked_for(supervisor: LocalSupervisor) -> None:
    """By default PID 1 keeps its pages to itself."""
    session = await supervisor.create(SessionSpec())
    assert not offers_pages(init_pid(session))


@needs_ksm
def test_root_allows_a_daemon_to_have_pages_merged() -> None:
    """A daemon that is not root asks in vain for more than the grant says; sessions work all the same."""
    plan = host_plan(
        limits=replace(ROOMY, cpu_quota_us=ALLOWANCE.cpu_quota_us),
        **{name: getattr(ALLOWANCE, name) for name in ("disk", "open_files", "tmp_bytes", "shm_bytes")},
    )
    for allowed in (False, True):
        granted = replace(ALLOWANCE, merge_pages=allowed)
        with data_directory() as data_dir, running(data_dir, allowance=granted, merge_pages=True) as server:
            assert server.ready.features["merge_pages"] is allowed
            box = server.build(plan)
            assert offers_pages(box.pid) is allowed
            assert box.run("echo works").out == "works\n"


@needs_ksm
def test_commands_can_not_offer_pages(server: Nsinit) -> None:
    """Neither by madvise(2) nor by prctl(2), high bits or not: who could would learn what other memory holds."""
    box = server.build(host_plan())
    said = box.python("""
import ctypes, errno, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = [ctypes.c_long] * 7
memory = mmap.mmap(-1, 1 << 16)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
def call(*args):
    ctypes.set_errno(0)
    return libc.syscall(*args, *[0] * (7 - len(args))) and errno.errorcode[ctypes.get_errno()]
for high in (0, 1 << 32):
    print(call(28, address, 1 << 16, high | 12), call(157, high | 67, 1))
print(call(28, address, 1 << 16, 4), call(157, 38, 1))
""")
    assert said.split() == ["EINVAL"] * 4 + ["0", "0"]


def is_merged(box: Sandbox) -> bool:
    return int(Path(f"/proc/{box.pid}/ksm_merging_pages").read_text()) > 500


@needs_ksm
@pytest.mark.skipif(not os.access(KSM / "run", os.W_OK), reason="the kernel's settings can't be changed here")
def test_idle_sessions_share_their_pages() -> None:
    """Most pages of two PID 1s that have run a command are merged, and both go on working."""
    with data_directory() as data_dir, running(data_dir, merge_pages=True) as server:
        boxes = [server.build(host_plan()) for _ in range(2)]
        for box in boxes:
            assert box.run("echo before").out == "before\n"
        with merging():
            wait_until(lambda: all(map(is_merged, boxes)), "half of each PID 1 is merged")
        for box in boxes:
            assert box.run("echo after").out == "after\n"
            assert box.run("head -c 100000 /dev/zero | wc -c").out == "100000\n"
