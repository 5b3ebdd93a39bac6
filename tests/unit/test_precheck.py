"""Checks of the machine: each says in words what is wrong, from facts that a test can make up."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandkasten.machine import Verdict
from sandkasten.runtime import host_checks

MOUNTINFO = """\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 21 0:20 / /proc rw - proc proc rw
30 21 0:30 / /mnt/c rw,noatime - 9p C:\\134 rw,trans=fd
31 21 0:31 / /mnt/with\\040space rw - vfat /dev/sdb1 rw
32 21 0:32 / /srv rw - xfs /dev/sdc rw
33 32 0:33 / /srv rw - nfs4 server:/srv rw
34 21 0:34 / /gcs rw - fuse.gcsfuse bucket rw
"""


def test_a_windows_drive_is_refused_with_the_way_out() -> None:
    """In WSL /mnt/c can't hold a session's layer, and the sentence says where to go."""
    check = host_checks.check_filesystem(Path("/mnt/c/Users/me/data"), MOUNTINFO)
    assert check.verdict is Verdict.MISSING
    assert "9p" in check.seen
    assert "not below /mnt/c" in check.seen
    assert "--data-dir" in check.fix


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/var/lib/x", "ext4"),
        ("/mnt/cd", "ext4"),
        ("/mnt/with space/x", "vfat"),
        ("/srv/x", "nfs4"),
        ("/gcs", "fuse.gcsfuse"),
    ],
)
def test_the_file_system_is_that_of_the_longest_and_last_mount(path: str, fstype: str) -> None:
    """Names are compared by component, escapes are undone, a mount over a mount wins."""
    assert host_checks.find_filesystem(Path(path), MOUNTINFO)[1] == fstype


@pytest.mark.parametrize(("path", "ok"), [("/var/lib/x", True), ("/mnt/with space/x", False), ("/gcs/x", False)])
def test_only_file_systems_that_can_hold_a_layer_pass(path: str, ok: bool) -> None:
    """Disks pass; foreign and user space file systems don't."""
    assert host_checks.check_filesystem(Path(path), MOUNTINFO).verdict is (Verdict.WORKS if ok else Verdict.MISSING)


@pytest.mark.parametrize(
    ("release", "verdict"),
    [
        ("5.10.0-1", Verdict.MISSING),
        ("4.19", Verdict.MISSING),
        ("5.15.167.4-microsoft-standard-WSL2", Verdict.FALLS_BACK),
        ("5.19.0", Verdict.WORKS),
        ("6.1.0-18-amd64", Verdict.WORKS),
        ("garbage", Verdict.MISSING),
    ],
)
def test_kernels_are_judged_by_number(release: str, verdict: Verdict) -> None:
    """Too old stops the start, old is told, new enough passes."""
    assert host_checks.check_kernel(release).verdict is verdict


def test_missing_capabilities_are_named() -> None:
    """Root in a container without SYS_ADMIN is told what is missing."""
    assert host_checks.check_capabilities("CapEff:\t000001ffffffffff\n").verdict is Verdict.WORKS
    check = host_checks.check_capabilities("CapEff:\t00000000a80425fb\n")
    assert check.verdict is Verdict.MISSING
    assert "CAP_SYS_ADMIN" in check.seen
    assert "--privileged" in check.fix
    assert host_checks.check_capabilities("").verdict is Verdict.MISSING


def test_who_is_not_root_is_told_so() -> None:
    """The sentence says what to do."""
    check = host_checks.check_root(1000)
    assert (check.verdict, check.seen, check.fix) == (Verdict.MISSING, "runs as user 1000", "run this as root (sudo)")


def test_a_forbidden_namespace_names_its_sysctl(tmp_path: Path) -> None:
    """A limit of zero is found before the first clone fails, and so is a missing kind."""
    for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        (tmp_path / "self/ns").mkdir(parents=True, exist_ok=True)
        (tmp_path / "self/ns" / name).touch()
    assert host_checks.check_namespaces(str(tmp_path)).verdict is Verdict.WORKS
    (tmp_path / "sys/user").mkdir(parents=True)
    (tmp_path / "sys/user/max_user_namespaces").write_text("0\n")
    check = host_checks.check_namespaces(str(tmp_path))
    assert (check.seen, check.fix) == ("user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=65536")
    (tmp_path / "self/ns/net").unlink()
    (tmp_path / "sys/user/max_user_namespaces").unlink()
    assert "no net namespaces" in host_checks.check_namespaces(str(tmp_path)).seen


def test_space_is_measured_before_the_directory_exists(tmp_path: Path) -> None:
    """The file system of the nearest directory above is asked."""
    check = host_checks.check_space(tmp_path / "not" / "there")
    assert "GiB free" in check.seen
    assert check.protection == ""
