"""Filters of our own processes: who is under which, that a refused call fails and is named, and who has none."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.helpers.builder import NAME as BUILDER
from nsinit.helpers.cgroup_maker import EMPTIER_NAME as CGROUP_EMPTIER
from nsinit.helpers.cgroup_maker import NAME as CGROUP_MAKER
from nsinit.helpers.forker import NAME as FORKER
from nsinit.helpers.forker import SEED_NAME as SEED
from nsinit.helpers.network_maker import NAME as NETWORK_MAKER
from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.kernel.seccomp.filters import ARCH
from nsinit.kernel.seccomp.table import NUMBERS
from nsinit.own_filters import BUILDER as BUILDER_PART
from nsinit.own_filters import CGROUP_MAKER as CGROUP_MAKER_PART
from nsinit.own_filters import DAEMON, NSINIT, PARTS, Part, PartFilters, refuse_machine
from nsinit.own_filters import NETWORK_MAKER as NETWORK_MAKER_PART
from nsinit.wire.protocol import Built, Failed, OpenNetwork, SetLimits
from tests.allowance import ALLOWANCE
from tests.kernel.harness import Nsinit, data_directory, host_plan, running

LIBC = ctypes.CDLL(None, use_errno=True)
THREADS, ROUNDS = 8, 200


def call(name: str, *arguments: int) -> int:
    """Make a system call with these arguments, else 0; return the errno."""
    ctypes.set_errno(0)
    LIBC.syscall(NUMBERS[ARCH][name], *[ctypes.c_long(each) for each in (*arguments, *[0] * 6)[:6]])
    return ctypes.get_errno()


def in_fork(work: Callable[[], object]) -> tuple[object, list[dict[str, object]]]:
    """Do work in a fork; return its result, which is JSON, and the lines of its log."""
    (said_read, said_write), (log_read, log_write) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.dup2(log_write, 2)
        os.write(said_write, json.dumps(work()).encode())
        os._exit(0)
    for fd in (said_write, log_write):
        os.close(fd)
    with open(said_read, "rb") as said, open(log_read, "rb") as logged:
        result, lines = said.read(), logged.read().splitlines()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, lines
    return json.loads(result), [json.loads(line) for line in lines]


def under(part: Part, work: Callable[[], object]) -> tuple[object, list[dict[str, object]]]:
    """Do work in a fork under the filter of a part."""

    def go() -> object:
        syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
        PartFilters(part).enter(part)
        return work()

    return in_fork(go)


def filters_of(pid: int) -> tuple[int, int]:
    """Return a process's seccomp mode and its number of filters."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {name: value for name, _, value in (line.partition(":\t") for line in lines)}
    return int(found["Seccomp"]), int(found["Seccomp_filters"])


DANGEROUS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "bpf", "perf_event_open", "userfaultfd"),
    *("io_uring_setup", "init_module", "finit_module", "kexec_load", "reboot", "swapon", "open_by_handle_at"),
    *("add_key", "request_key", "fanotify_init", "settimeofday", "acct", "memfd_secret"),
)

OTHER_COMMAND = 1
"""Of bpf(2): BPF_MAP_LOOKUP_ELEM."""


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_what_a_part_does_not_need_fails_and_is_named(part: Part) -> None:
    """Each refused call fails with ENOSYS; the log has each name once, however often the call was made."""
    seen, lines = under(part, lambda: [call(name, OTHER_COMMAND) for _ in range(2) for name in DANGEROUS])
    assert seen == [errno.ENOSYS] * (2 * len(DANGEROUS))
    assert [(line["event"], line["part"], line["call"]) for line in lines] == [
        ("system call refused", part.name, name) for name in DANGEROUS
    ]


def test_one_part_alone_calls_bpf_and_for_four_commands() -> None:
    """Of all commands of bpf(2) the network maker has those that steer, of netlink the routes alone; no other part has
    any."""

    def commands() -> object:
        sockets = [call("socket", socket.AF_NETLINK, socket.SOCK_RAW, family) for family in (0, 4, 12)]
        return [number for number in range(64) if call("bpf", number) != errno.ENOSYS], sockets

    for part in PARTS:
        found, _ = under(part, commands)
        assert isinstance(found, list)
        allowed, sockets = found
        steering = [k.BPF_MAP_CREATE, k.BPF_MAP_UPDATE_ELEM, k.BPF_PROG_LOAD, k.BPF_LINK_CREATE]
        assert allowed == (steering if part is NETWORK_MAKER_PART else [])
        if part is NETWORK_MAKER_PART:
            assert sockets == [0, errno.ENOSYS, errno.ENOSYS]


OTHERS = {
    "daemon": (DAEMON, ("execve", "mount", "unshare", "setns", "setresuid", "capset", "chroot", "keyctl", "mknodat")),
    "builder": (BUILDER_PART, ("kill", "pidfd_send_signal", "setresuid", "bind", "keyctl", "accept4")),
    "cgroup maker": (
        CGROUP_MAKER_PART,
        ("execve", "mount", "unshare", "setns", "clone", "socket", "kill", "renameat2"),
    ),
    "network maker": (
        NETWORK_MAKER_PART,
        ("execve", "mount", "unshare", "clone", "kill", "openat", "connect", "accept4", "capset", "chroot"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_part_has_no_call_of_another(name: str) -> None:
    """Each part has the calls of its own work; those of other parts fail and are named."""
    part, calls = OTHERS[name]
    seen, lines = under(part, lambda: [call(each) for each in calls])
    assert seen == [errno.ENOSYS] * len(calls)
    assert [line["call"] for line in lines] == list(calls)


def test_the_daemon_starts_threads_and_no_process() -> None:
    """Threads start; a process does not, by any call, and the attempt does not end the daemon."""

    def attempt() -> object:
        started: list[int] = []
        threads = [threading.Thread(target=started.append, args=(1,)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refusals = []
        for start in (
            os.fork,
            lambda: os.posix_spawn("/bin/true", ["true"], {}),
            lambda: os.execv("/bin/true", ["true"]),
        ):
            try:
                start()
            except OSError as error:
                refusals.append(error.errno)
        return [len(started), *refusals]

    assert under(DAEMON, attempt)[0] == [THREADS, *[errno.ENOSYS] * 3]


def test_the_daemon_opens_sockets_of_four_families_and_types_into_no_terminal() -> None:
    """Unix, both internets and netlink pass; packets, virtual machines and ciphers don't, nor does TIOCSTI."""
    families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG)
    seen, _ = under(DAEMON, lambda: [call("socket", family, socket.SOCK_DGRAM) for family in families])
    assert seen == [0, 0, 0, *[errno.ENOSYS] * 3]
    seen, lines = under(DAEMON, lambda: [call("ioctl", 0, 0x5412), call("ioctl", 0, 0x541C)])
    assert seen == [errno.ENOSYS] * 2
    assert [line["call"] for line in lines] == ["ioctl"]


def test_a_refused_call_in_any_thread_has_its_errno_there() -> None:
    """Refusals of many threads at once, with calls that pass in between: each gets the result of its own call."""

    def attempt() -> object:
        wrong: list[int] = []

        def work() -> None:
            for _ in range(ROUNDS):
                if call("ptrace") != errno.ENOSYS or call("getpid") != 0:
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(wrong)

    seen, lines = under(DAEMON, attempt)
    assert (seen, len(lines)) == (0, 1)


def test_a_signal_that_a_process_sends_is_no_refusal() -> None:
    """SIGSYS of a person's kill(1) changes no result and no register."""
    seen, lines = under(NSINIT, lambda: [call("kill", os.getpid(), signal.SIGSYS), call("getpid")])
    assert (seen, lines) == ([0, 0], [])


def test_the_launcher_refuses_power_over_the_machine_to_all_below() -> None:
    """The few calls fail with EPERM, as they do without the capability; every other call passes."""

    def attempt() -> object:
        syscalls.prctl(k.PR_SET_NO_NEW_PRIVS, 1)
        refuse_machine()
        return [call("swapon"), call("finit_module", -1), call("settimeofday"), call("unshare"), call("ptrace", 99)]

    seen, lines = in_fork(attempt)
    assert seen[:3] == [errno.EPERM] * 3  # type: ignore[index]
    assert seen[3] == 0  # type: ignore[index]
    assert seen[4] != errno.ENOSYS  # type: ignore[index]
    assert lines == []


@pytest.fixture
def server(shared: Nsinit) -> Nsinit:
    return shared


def test_nsinit_and_its_helpers_are_under_filters_and_what_becomes_a_sandbox_is_not(server: Nsinit) -> None:
    """Each helper has a filter of its own, on top of nsinit's if it was started later. Of the processes that PID 1 is a
    fork of, none has one."""
    assert filters_of(server.pid) == (2, 1)
    for name in (BUILDER, CGROUP_MAKER, CGROUP_EMPTIER):
        assert {filters_of(pid) for pid in server.helpers(name)} <= {(2, 1), (2, 2)}
        assert server.helpers(name)
    for name in (SEED, FORKER):
        assert {filters_of(pid) for pid in server.helpers(name)} == {(0, 0)}


def test_the_filters_can_be_switched_off_and_the_log_says_so() -> None:
    """For debugging: no process has one."""
    with data_directory() as data_dir, running(data_dir, own_filters=False) as server:
        assert filters_of(server.pid) == (0, 0)
        assert {filters_of(pid) for name in (BUILDER, CGROUP_MAKER) for pid in server.helpers(name)} == {(0, 0)}
        assert "no filter of nsinit's own system calls" in server.log


def test_nsinit_refuses_what_root_does_not_grant() -> None:
    """The refusal is nsinit's own, typed and in its log; the daemon's word does not matter."""
    with data_directory() as data_dir, running(data_dir, allowance=ALLOWANCE, own_filters=False) as server:
        assert filters_of(server.pid)[0] == 2  # the grant says whether there are filters
        plan = replace(host_plan(), tmp_bytes=64 << 20, shm_bytes=32 << 20, open_files=4096, root_inside=False)
        small = replace(plan, disk=ALLOWANCE.disk, limits=replace(plan.limits, pids=64, cpu_quota_us=100_000))
        for asked, word in (
            (replace(small, seccomp="off"), "seccomp profile 'off'"),
            (replace(small, image="other"), "image 'other'"),
            (replace(small, root_inside=True), "root inside"),
            (replace(small, limits=replace(small.limits, memory_bytes=2 << 30)), "memory_bytes"),
        ):
            failed = server.refused(asked)
            assert (failed.stage, word in failed.message) == ("grant", True), failed
            assert server.traces(asked.session_id) == []
        box = server.build(small)
        failed, _ = server.ask(SetLimits, session_id=small.session_id, limits=replace(small.limits, pids=100_000))
        assert (type(failed), failed.stage) == (Failed, "grant")
        failed, _ = server.ask(OpenNetwork, session_id=small.session_id)
        assert (type(failed), failed.stage) == (Failed, "grant")
        assert server.helpers(NETWORK_MAKER) == set()
        assert box.run("echo fine").out == "fine\n"
        box.teardown()
        assert server.log.count('"stage": "grant"') == 6


def test_nsinit_takes_no_rules_but_those_that_root_has_read() -> None:
    """A start with other profiles than the granted ones is refused."""
    granted = replace(ALLOWANCE, own_profiles=[{"name": "own"}])
    with data_directory() as data_dir, running(data_dir, allowance=granted) as server:
        assert (type(server.ready), server.ready.stage) == (Failed, "validate")
        assert not isinstance(server.ready, Built)
