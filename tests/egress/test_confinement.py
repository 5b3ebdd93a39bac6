"""Confinement, tried from inside of a confined process; no step of it can be left out."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from egress import confinement
from egress.confinement import ARCHITECTURES, NUMBERS, REFUSED, filter_program
from egress.protocol import EGRESS_ID
from nsinit.kernel.seccomp.table import AUDIT_ARCH
from nsinit.kernel.seccomp.table import NUMBERS as ALL_NUMBERS
from tests import cbpf

_ROOT = str(Path(confinement.__file__).parents[1])
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
_SOCK_CLOEXEC = 0x80000

_MAIN = """
import os, sys
sys.argv = ["egress"]
from egress import __main__, barrier, confinement, resolver

def fail(*arguments):
    raise OSError(1, "refused")

FAILING = fail
os.dup2(0, 3)
sys.exit(__main__.main())
"""


def run_program(text: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {_ROOT!r})\n{text}"
    return subprocess.run([sys.executable, "-I", "-B", "-c", code], capture_output=True, text=True, input="")


@functools.cache
def inside(*, dials: bool = True) -> dict[str, Any]:
    """Confine a process, try everything in it, and return what came of each attempt."""
    bpf = REFUSED["bpf"][ARCHITECTURES[platform.machine()][0]]
    done = run_program(f"from tests.egress import attempts; attempts.main({EGRESS_ID}, {bpf}, dials={dials})")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_user_is_nobody_else() -> None:
    """Own user and group, no group besides, no capability, no way to new ones, no core dump, not dumpable."""
    found = inside()
    assert found["users"] == [EGRESS_ID] * 6
    assert found["groups"] == []
    status = found["status"]
    assert {status[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert (found["descriptors"], found["core"], found["dumpable"]) == (1, 0, 0)


@pytest.mark.parametrize(
    "attempt",
    [
        "fork",
        "spawn",
        "execve",
        "memfd",
        "root",
        "ptrace",
        "kill",
        "unshare",
        "setns",
        "mount",
        "bpf",
        "raw",
        "ping",
        "mptcp",
        "sctp",
        "packet",
        "vsock",
    ],
)
def test_the_filter_refuses(attempt: str) -> None:
    """Each call fails with EPERM, in either role. A socket of MPTCP would connect past the programs of a cgroup."""
    assert inside()[attempt] == inside(dials=False)[attempt] == "errno 1"


def test_the_gateway_makes_no_socket_and_reads_no_file() -> None:
    """Sockets are handed to the gateway, and it looks no name up."""
    found = inside(dials=False)
    assert {found[each] for each in ("internet", "internet6", "netlink", "unix")} == {"errno 1"}
    if confinement.landlock_version():
        assert found["hosts"] == "errno 13"


@pytest.mark.parametrize("attempt", ["internet", "internet6", "netlink", "unix", "thread", "lookup"])
def test_the_work_goes_on(attempt: str) -> None:
    """Sockets of the internet, threads, and look-ups of names in them."""
    assert not str(inside()[attempt]).startswith("errno")


def test_no_file_but_those_of_look_ups_can_be_read_and_none_written() -> None:
    """Landlock refuses, where users and modes would not."""
    if not confinement.landlock_version():
        pytest.skip("this kernel has no Landlock")
    found = inside()
    assert found["hosts"] == "done"
    assert {found[each] for each in ("proc", "tmp", "etc", "tree", "home")} == {"errno 13"}


@pytest.mark.parametrize(
    "failing",
    [
        *("confinement.resource.setrlimit", "os.setgroups", "os.setresgid", "os.setresuid", "confinement._prctl"),
        *("confinement._check_nothing_is_left", "confinement.landlock_version", "confinement._keep_files"),
        *("confinement.enter_filter", "resolver.own_addresses", "barrier.enclose"),
    ],
)
def test_a_step_that_fails_ends_the_process(failing: str) -> None:
    """A line in the log and status 1: it serves nobody with one step less."""
    if failing.endswith("_keep_files") and not confinement.landlock_version():
        pytest.skip("this kernel has no Landlock")
    text = _MAIN.replace("FAILING", failing)
    done = run_program(text)
    assert done.returncode == 1, done.stderr
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["not_confined"]


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_the_filter_says_the_same_on_both_machines(arch: Any) -> None:
    """By the numbers of nsinit's table: refusals, threads against processes, families of sockets, foreign calls."""
    program = cbpf.load(filter_program(arch))
    numbers, audit = ALL_NUMBERS[arch], AUDIT_ARCH[arch]
    column = ARCHITECTURES[arch][0]
    assert {name: each[column] for name, each in {**NUMBERS, **REFUSED}.items()} == {
        name: numbers.get(name) for name in {**NUMBERS, **REFUSED}
    }
    answers = {name: cbpf.run(program, audit, number) for name, number in numbers.items()}
    special = {"clone", "clone3", "socket"}
    assert {name for name, answer in answers.items() if answer == _EPERM} - special == REFUSED.keys() & numbers.keys()
    assert {answer for name, answer in answers.items() if name not in {*REFUSED, *special}} == {_ALLOW}
    assert answers["clone3"] == _ENOSYS
    assert cbpf.run(program, audit, numbers["clone"], 0x3D0F00) == _ALLOW  # pthread_create(3)
    assert cbpf.run(program, audit, numbers["clone"], 0x11) == _EPERM  # fork(3)
    sockets = {
        (family, kind, number)
        for family in range(64)
        for kind in range(16)
        for number in (0, 1, 6, 17, 33, 132, 136, 256, 262)
        if cbpf.run(program, audit, numbers["socket"], family, kind | _SOCK_CLOEXEC, number) == _ALLOW
    }
    assert {each for each in sockets if each[0] in (2, 10)} == {
        (family, kind, number) for family in (2, 10) for kind in (1, 2) for number in (0, 6, 17)
    }
    assert {family for family, _, _ in sockets} == {1, 2, 10, 16}
    closed = cbpf.load(filter_program(arch, dials=False))
    assert {cbpf.run(closed, audit, numbers["socket"], family, 1) for family in range(64)} == {_EPERM}
    assert cbpf.run(closed, audit, numbers["connect"]) == _ALLOW
    assert cbpf.run(program, audit, 0x40000000 + numbers["read"]) == _EPERM
    assert cbpf.run(program, 0x40000003, 11) == _KILL  # a call of i386
