"""`sandkasten doctor` and the start on machines that lack something: by the kernel's own means, not by mocks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from egress.confinement import ARCHITECTURES, REFUSED
from sandkasten.host.checks import CATALOGUE
from sandkasten.model.node import PROTECTIONS, Need
from tests.waiting import patience

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

SCRIPT = str(Path(sys.executable).with_name("sandkasten"))
CLONE3, FSOPEN, LANDLOCK = 435, 430, 444

WITHOUT = """
import ctypes, os, struct, sys
numbers = [int(each) for each in sys.argv[1].split(",")]
code = [(0x20, 0, 0, 0)]  # load the number of the call
for number in numbers:
    code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 38)]  # errno 38 is ENOSYS
code.append((0x06, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
header = struct.pack("@HP", len(code), ctypes.addressof(program))
prctl = ctypes.CDLL(None).prctl
prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
assert prctl(38, 1, None, 0, 0) == 0  # no_new_privs
assert prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a program on a kernel that lacks system calls, as far as the program can tell."""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SANDKASTEN_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patience(120), check=False, env=variables | environment
    )


def without(numbers: Sequence[int]) -> tuple[str, ...]:
    return (sys.executable, "-c", WITHOUT, ",".join(map(str, numbers)))


def found_by(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return checks and protections by name, and what is lacking."""
    view = json.loads(done.stdout)
    checks = {check["id"]: check for check in view["checks"]}
    return checks, {each["name"]: each for each in view["protections"]}, view["lacks"]


def test_a_machine_that_can_run_sandboxes_is_told_so(tmp_path: Path) -> None:
    """Everything in the catalogue is tried, all that is essential is on, status 0, and nothing stays."""
    done = run(SCRIPT, "doctor", "--json", "--data-dir", str(tmp_path / "data"))
    checks, protections, lacks = found_by(done)
    assert (done.returncode, lacks) == (0, []), done.stderr
    assert set(CATALOGUE) - set(checks) == {"probe"}
    assert [check_id for check_id, check in checks.items() if check["required"] and check["verdict"] == "missing"] == []
    for name, need in PROTECTIONS.items():
        if need is Need.ESSENTIAL:
            assert (name, protections[name]["required"], protections[name]["state"]) == (name, True, "on")
    assert os.listdir(tmp_path) == []


def test_the_table_ends_with_one_sentence(tmp_path: Path) -> None:
    """The table for people has a line for each check, what weakens the configuration, and a sentence with the
    conclusion; before an installation, too, and none is made."""
    done = run(SCRIPT, "doctor", "--data-dir", str(tmp_path / "data"), SANDKASTEN_LISTEN="0.0.0.0:8080")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1] == "sandboxes can be made here"
    assert any(line.startswith("ok ") and "overlayfs" in line for line in lines)
    assert any(line.startswith("on ") and " limits " in line for line in lines)
    assert any(line.startswith("note ") and "0.0.0.0:8080 is plain HTTP" in line for line in lines)
    assert f"data directory {tmp_path}/data, which does not exist" in done.stderr
    assert os.listdir(tmp_path) == []
    assert run(SCRIPT, "doctor", "--jsn").returncode == 2


def test_calls_that_the_kernel_lacks_are_named_with_their_fix(tmp_path: Path) -> None:
    """Without clone3 and fsopen there are neither namespaces nor mounts; a filter around us is known as one."""
    done = run(*without([CLONE3, FSOPEN]), SCRIPT, "doctor", "--json", "--data-dir", str(tmp_path))
    checks, protections, lacks = found_by(done)
    assert done.returncode == 1
    for check_id in ("clone3", "namespaces", "overlay", "devpts"):
        assert (check_id, checks[check_id]["verdict"]) == (check_id, "missing")
        assert "Function not implemented" in checks[check_id]["seen"]
        assert "outside of its container" in checks[check_id]["fix"]
    assert checks["openat2"]["verdict"] == "works"
    assert (protections["namespaces"]["state"], protections["filesystem"]["state"]) == ("missing", "missing")
    assert {line.split(" ")[0] for line in lacks} >= {"namespaces", "filesystem"}
    assert os.listdir(tmp_path) == []


def test_the_daemon_does_not_start_without_what_it_needs(tmp_path: Path) -> None:
    """One line for each lack, with the fix; nothing was made."""
    done = run(*without([FSOPEN]), SCRIPT, "serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    assert (done.returncode, done.stdout) == (1, "")
    first, *_, last = done.stderr.splitlines()
    assert first.startswith("sandkasten: filesystem is required and missing: ")
    assert "fsopen" in first
    assert "a kernel from" in first
    assert last == "sandkasten: `sandkasten doctor` shows everything that was tried"
    assert os.listdir(tmp_path / "data") == []


def test_what_is_listed_as_required_must_be_there(tmp_path: Path) -> None:
    """Landlock is used where it is; a kernel without it is refused only by who requires it, and says how to go on."""
    doctor = (SCRIPT, "doctor", "--json", "--data-dir", str(tmp_path))
    done = run(*without([LANDLOCK]), *doctor)
    checks, protections, _ = found_by(done)
    assert done.returncode == 0, done.stdout
    assert (checks["landlock_scopes"]["verdict"], protections["landlock"]["state"]) == ("missing", "missing")
    assert "lsm=" in protections["landlock"]["fix"]
    done = run(*without([LANDLOCK]), *doctor, SANDKASTEN_ISOLATION_REQUIRED="landlock")
    assert done.returncode == 1
    (lack,) = found_by(done)[2]
    assert lack.startswith("landlock is required and missing: ")
    assert "isolation.required" in lack


def test_without_bpf_a_way_out_is_told_to_be_less(tmp_path: Path) -> None:
    """Nothing that sessions without a network need is missing; the rows say the loss and the fix."""
    bpf = REFUSED["bpf"][ARCHITECTURES[platform.machine()][0]]
    assert bpf is not None
    done = run(*without([bpf]), SCRIPT, "doctor", "--json", "--data-dir", str(tmp_path))
    checks, _, lacks = found_by(done)
    assert (done.returncode, lacks) == (0, []), done.stdout
    for check_id, loss, fix in (
        ("sk_lookup", "has a proxy", "CONFIG_BPF_SYSCALL"),
        ("address_programs", "not by the kernel", "CONFIG_CGROUP_BPF"),
    ):
        check = checks[check_id]
        assert (check["verdict"], check["required"]) == ("falls_back", False)
        assert "Function not implemented" in check["seen"]
        assert loss in check["consequence"]
        assert fix in check["fix"] or "outside of its container" in check["fix"]


def test_a_forbidden_namespace_is_found_by_trying_and_names_its_sysctl(tmp_path: Path) -> None:
    """`user.max_net_namespaces` of a user namespace of its own is 0: the answer names the kind and the line to type."""
    script = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    command = ("unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", SCRIPT)
    done = run(*command, "doctor", "--json", "--data-dir", str(tmp_path))
    checks, protections, _ = found_by(done)
    assert done.returncode == 1
    assert checks["namespaces"]["verdict"] == "missing"
    assert "net:" in checks["namespaces"]["seen"]
    assert checks["namespaces"]["fix"].startswith("`sysctl -w user.max_net_namespaces=65536`")
    assert protections["namespaces"]["state"] == "missing"


def test_an_ordinary_user_is_told_what_could_not_be_tried(tmp_path: Path) -> None:
    """Checks that need no privilege are made; the others are reported as not tried, not as broken; the exit status is
    1.
    """
    powers = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")  # to read this installation
    user = ("setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", *powers)
    done = run(*user, SCRIPT, "doctor", "--json", "--data-dir", str(tmp_path / "data"))
    checks, protections, lacks = found_by(done)
    assert done.returncode == 1
    assert {checks[check_id]["verdict"] for check_id in ("clone3", "openat2", "pidfd", "seccomp")} == {"works"}
    for check_id in ("namespaces", "overlay", "user_namespace", "cgroups"):
        assert (check_id, checks[check_id]["verdict"]) == (check_id, "not_tried")
        assert checks[check_id]["seen"].startswith("not tried: takes root (")
    assert (checks["root"]["verdict"], checks["root"]["fix"]) == ("missing", "run this as root (sudo)")
    assert protections["filesystem"]["state"] == "unknown"
    assert any(line.startswith("privilege is required and missing") for line in lacks)
