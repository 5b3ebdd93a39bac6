"""Checks of the machine: each says in words what is wrong, from facts that a test can make up."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandkasten.runtime import precheck

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
    check = precheck.check_filesystem(Path("/mnt/c/Users/me/data"), MOUNTINFO)
    assert not check.ok
    assert "9p" in check.detail
    assert "not below /mnt/c" in check.detail


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
    assert precheck.find_filesystem(Path(path), MOUNTINFO)[1] == fstype


@pytest.mark.parametrize(("path", "ok"), [("/var/lib/x", True), ("/mnt/with space/x", False), ("/gcs/x", False)])
def test_only_file_systems_that_can_hold_a_layer_pass(path: str, ok: bool) -> None:
    """Disks pass; foreign and user space file systems don't."""
    assert precheck.check_filesystem(Path(path), MOUNTINFO).ok is ok


@pytest.mark.parametrize(
    ("release", "ok", "required"),
    [
        ("5.10.0-1", False, True),
        ("4.19", False, True),
        ("5.15.167.4-microsoft-standard-WSL2", False, False),
        ("5.19.0", True, True),
        ("6.1.0-18-amd64", True, True),
        ("garbage", False, True),
    ],
)
def test_kernels_are_judged_by_number(release: str, ok: bool, required: bool) -> None:
    """Too old stops the start, old is told, new enough passes."""
    check = precheck.check_kernel(release)
    assert (check.ok, check.required) == (ok, required)


def test_missing_capabilities_are_named() -> None:
    """Root in a container without SYS_ADMIN is told what is missing."""
    assert precheck.check_capabilities("CapEff:\t000001ffffffffff\n").ok
    check = precheck.check_capabilities("CapEff:\t00000000a80425fb\n")
    assert not check.ok
    assert "CAP_SYS_ADMIN" in check.detail
    assert not precheck.check_capabilities("").ok


def test_who_is_not_root_is_told_so() -> None:
    """The sentence says what to do."""
    assert precheck.check_root(1000).detail == "run this as root (sudo)"


def test_a_forbidden_namespace_names_its_sysctl(tmp_path: Path) -> None:
    """A limit of zero is found before the first clone fails, and so is a missing kind."""
    for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        (tmp_path / "self/ns").mkdir(parents=True, exist_ok=True)
        (tmp_path / "self/ns" / name).touch()
    assert precheck.check_namespaces(str(tmp_path)).ok
    (tmp_path / "sys/user").mkdir(parents=True)
    (tmp_path / "sys/user/max_user_namespaces").write_text("0\n")
    assert "user.max_user_namespaces is 0" in precheck.check_namespaces(str(tmp_path)).detail
    (tmp_path / "self/ns/net").unlink()
    (tmp_path / "sys/user/max_user_namespaces").unlink()
    assert "no net namespaces" in precheck.check_namespaces(str(tmp_path)).detail


def test_space_is_measured_before_the_directory_exists(tmp_path: Path) -> None:
    """The file system of the nearest directory above is asked."""
    check = precheck.check_space(tmp_path / "not" / "there")
    assert "GiB free" in check.detail
    assert not check.required
