"""Checks of the machine: each says in words what is wrong, from facts that a test can make up."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nsinit.tools.trials import network
from nsinit.tools.trials.attempt import Room, attempt
from sandkasten.admission.budget import FIXES, SessionRoom
from sandkasten.cli import doctor
from sandkasten.host import examine
from sandkasten.host.checks import (
    CATALOGUE,
    Host,
    advise,
    check_bridge_way,
    check_merging,
    check_pools,
    check_room,
    check_sysctls,
    check_upstream,
    find_mount,
    read_host,
)
from sandkasten.model.node import Check, Machine, Verdict

MOUNTINFO = """\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 21 0:20 / /proc rw - proc proc rw
30 21 0:30 / /mnt/c rw,noatime - 9p C:\\134 rw,trans=fd
31 21 0:31 / /mnt/with\\040space rw - vfat /dev/sdb1 rw
32 21 0:32 / /srv rw - xfs /dev/sdc rw
33 32 0:33 / /srv rw - nfs4 server:/srv rw
34 21 0:34 / /gcs rw - fuse.gcsfuse bucket rw
"""


def judge(check_id: str, host: Host) -> Check:
    read = CATALOGUE[check_id].read
    assert read is not None
    return read(host)


def judge_place(path: str) -> Check:
    return judge("data_dir", Host(data_dir=Path(path), mountinfo=MOUNTINFO))


def test_a_windows_drive_is_refused_with_the_way_out() -> None:
    """In WSL /mnt/c can't hold a session's layer, and the sentence says where to go."""
    check = judge_place("/mnt/c/Users/me/data")
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
    mount = find_mount(Path(path), MOUNTINFO)
    assert mount is not None
    assert mount.fstype == fstype


@pytest.mark.parametrize(("path", "ok"), [("/var/lib/x", True), ("/mnt/with space/x", False), ("/gcs/x", False)])
def test_only_file_systems_that_can_hold_a_layer_pass(path: str, ok: bool) -> None:
    """Disks pass; foreign and user space file systems don't."""
    assert judge_place(path).verdict is (Verdict.WORKS if ok else Verdict.MISSING)


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
    assert judge("kernel", Host(release=release)).verdict is verdict


def test_what_doctor_says_in_wsl_is_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/wsl2.md quotes the rows of an old WSL kernel with the data directory on a Windows drive."""
    place = Path("/mnt/c/Users/me/sandkasten")
    host = Host(release="5.15.167.4-microsoft-standard-WSL2", data_dir=place, mountinfo=MOUNTINFO)
    doctor._print_table(Machine(datetime.now(UTC), [judge(name, host) for name in ("kernel", "wsl", "data_dir")], {}))
    printed = capsys.readouterr().out.replace(f"{Path(sys.executable).parent}/", "")
    assert f"```\n{printed}```" in (Path(__file__).parents[2] / "docs/wsl2.md").read_text()


def test_an_old_kernel_is_not_told_to_become_what_it_is() -> None:
    """Linux 5.15 works in part; the fix names the version that works whole."""
    assert judge("kernel", Host(release="5.15.0")).fix == "a kernel from 5.19 on"


def test_missing_capabilities_are_named() -> None:
    """Root in a container without SYS_ADMIN is told what is missing, and where to run instead."""
    assert judge("capabilities", Host(status="CapEff:\t000001ffffffffff\n")).verdict is Verdict.WORKS
    check = judge("capabilities", Host(status="CapEff:\t00000000a80425fb\n", container="docker"))
    assert check.verdict is Verdict.MISSING
    assert "CAP_SYS_ADMIN" in check.seen
    assert "virtual machine" in check.fix
    assert judge("capabilities", Host()).verdict is Verdict.MISSING


def test_a_capability_that_only_helps_is_no_reason_to_stop() -> None:
    """Without CAP_SYS_RESOURCE the check falls back."""
    assert judge("sys_resource", Host(status="CapEff:\t000001ffffffffff\n")).verdict is Verdict.WORKS
    assert judge("sys_resource", Host(status="CapEff:\t000001fffeffffff\n")).verdict is Verdict.FALLS_BACK


def test_who_is_not_root_is_told_so() -> None:
    """The sentence says what to do."""
    check = judge("root", Host(euid=1000))
    assert (check.verdict, check.seen, check.fix) == (Verdict.MISSING, "runs as user 1000", "run this as root (sudo)")


MACHINES: dict[str, dict[str, str]] = {
    "docker": {".dockerenv": "", "proc/self/status": "Seccomp:\t2\n"},
    "podman": {"run/.containerenv": ""},
    "lxc": {"proc/1/environ": "HOME=/\0container=lxc\0TERM=x"},
    "wsl": {
        "run/systemd/container": "wsl\n",
        "proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n",
    },
    "plain": {"proc/self/status": "Seccomp:\t0\n", "proc/sys/user/max_net_namespaces": "0\n"},
}


def look_around(tmp_path: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return read_host(tmp_path, f"{tmp_path}/")


@pytest.mark.parametrize(
    ("name", "container", "is_wsl"),
    [("docker", "docker", False), ("podman", "podman", False), ("lxc", "lxc", False), ("wsl", "", True)],
)
def test_what_is_around_is_recognised(tmp_path: Path, name: str, container: str, is_wsl: bool) -> None:
    """Containers by their marks, WSL by its kernel; each has a check that says what to do."""
    host = look_around(tmp_path, MACHINES[name])
    assert (host.container, host.is_wsl) == (container, is_wsl)
    check = judge("wsl" if is_wsl else "container", host)
    assert check.verdict is Verdict.FALLS_BACK
    assert ("kernelCommandLine" if is_wsl else "virtual machine") in check.fix
    assert judge("wsl", Host()).verdict is judge("container", Host()).verdict is Verdict.WORKS


def test_the_same_failure_has_another_cure_elsewhere(tmp_path: Path) -> None:
    """A sysctl, AppArmor, a container's privilege, a container's filter, or else the usual."""
    plain, docker = look_around(tmp_path, MACHINES["plain"]), Host(container="docker", status="Seccomp:\t2\n")
    assert advise("namespaces", errno.ENOSPC, plain).startswith("`sysctl -w user.max_net_namespaces=65536`")
    debian = Host(sysctls={"kernel.unprivileged_userns_clone": "0"})
    assert advise("user_namespace", errno.EPERM, debian).startswith("`sysctl -w kernel.unprivileged_userns_clone=1`")
    ubuntu = Host(sysctls={"kernel.apparmor_restrict_unprivileged_userns": "1"})
    assert "\n  userns,\n" in advise("user_namespace", errno.EACCES, ubuntu)
    assert os.path.realpath(sys.executable) in advise("user_namespace", errno.EACCES, ubuntu)
    assert advise("overlay", errno.EACCES, ubuntu) == CATALOGUE["overlay"].fix
    assert "virtual machine" in advise("overlay", errno.EPERM, docker)
    assert "outside of its container" in advise("mounts", errno.ENOSYS, docker)
    assert advise("mounts", errno.ENOSYS, Host()) == CATALOGUE["mounts"].fix


def test_settings_are_judged_and_come_with_the_line_that_sets_them(tmp_path: Path) -> None:
    """Each in its own direction; one that the kernel does not have is left out."""
    values = {"fs/protected_symlinks": "0", "fs/protected_regular": "2", "dev/tty/legacy_tiocsti": "1"}
    host = look_around(tmp_path, {f"proc/sys/{name}": f"{value}\n" for name, value in values.items()})
    checks = {check.id: check for check in check_sysctls(host)}
    assert {check_id: check.verdict for check_id, check in checks.items()} == {
        "fs.protected_symlinks": Verdict.FALLS_BACK,
        "fs.protected_regular": Verdict.WORKS,
        "dev.tty.legacy_tiocsti": Verdict.FALLS_BACK,
    }
    assert checks["fs.protected_symlinks"].fix.startswith("`sysctl -w fs.protected_symlinks=1`")
    assert checks["dev.tty.legacy_tiocsti"].fix.startswith("`sysctl -w dev.tty.legacy_tiocsti=0`")
    assert not any(check.protection for check in checks.values())


def test_what_is_scarce_is_told() -> None:
    """Descriptors, inotify instances and a clock that stands before the installation."""
    assert judge("descriptors", Host(max_descriptors=1024)).verdict is Verdict.FALLS_BACK
    assert judge("descriptors", Host(max_descriptors=1 << 20)).verdict is Verdict.WORKS
    assert (
        "fs.inotify.max_user_instances" in judge("inotify", Host(sysctls={"fs.inotify.max_user_instances": "64"})).fix
    )
    assert judge("inotify", Host(sysctls={"fs.inotify.max_user_instances": "128"})).verdict is Verdict.WORKS
    assert judge("clock", Host(now_s=0, installed_s=1e9)).verdict is Verdict.FALLS_BACK
    assert judge("clock", Host(now_s=1e9, installed_s=1e9)).verdict is Verdict.WORKS


def test_pools_of_the_machine_that_are_too_small_for_all_sessions_come_with_the_line_that_sets_them() -> None:
    """A pool counts whatever sessions there may be; one that suffices or does not exist is left out."""
    host = Host(sysctls={"kernel.pid_max": "32768", "kernel.pty.max": "4096", "user.max_net_namespaces": "96364"})
    assert check_pools(host, sessions=10, processes=256) == []
    checks = {check.id: check for check in check_pools(host, sessions=1000, processes=256)}
    assert {name: check.verdict for name, check in checks.items()} == {
        "kernel.pid_max": Verdict.FALLS_BACK,
        "kernel.pty.max": Verdict.FALLS_BACK,
    }
    assert "`sysctl -w kernel.pid_max=260096`" in checks["kernel.pid_max"].fix
    assert "`sysctl -w kernel.pty.max=17024`" in checks["kernel.pty.max"].fix


def test_the_number_of_sessions_is_told_with_the_limit_behind_it() -> None:
    """Fewer than `server.max_sessions` come with the consequence and the fix."""
    enough = check_room(SessionRoom(1000, "server.max_sessions"), 1000)
    assert (enough.verdict, enough.seen) == (Verdict.WORKS, "1000 with default limits, bounded by server.max_sessions")
    few = check_room(SessionRoom(486, "memory"), 1000)
    assert (few.verdict, few.fix) == (Verdict.FALLS_BACK, FIXES["memory"])
    assert "486" in few.consequence


def test_merging_of_pages_is_the_operators_to_switch_on() -> None:
    """A kernel that could and does not comes with the line for it, one that can't with its option."""
    assert check_merging(Host(merging="1")).verdict is Verdict.WORKS
    switched_off, missing = check_merging(Host(merging="0")), check_merging(Host())
    assert switched_off.verdict is missing.verdict is Verdict.FALLS_BACK
    assert "`echo 1 > /sys/kernel/mm/ksm/run`" in switched_off.fix
    assert missing.fix == "CONFIG_KSM=y"


def test_a_proxy_that_nothing_is_reached_by_is_told() -> None:
    """The operator's proxy is connected to; without it no session reaches anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert check_upstream(url).verdict is Verdict.WORKS
    away = check_upstream(url)
    assert (away.verdict, away.seen) == (Verdict.MISSING, f"{url}: Connection refused")


def test_the_way_of_bridges_is_looked_for(tmp_path: Path) -> None:
    """By the default route of the lowest metric: a forwarding that is off is named with its line, a route of somebody
    else's into the range is told, and those of sessions are their own."""
    routes, setting = tmp_path / "proc/net/route", tmp_path / "proc/sys/net/ipv4/conf/up.1/forwarding"
    for each in (routes, setting):
        each.parent.mkdir(parents=True)
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    default = "up.1\t00000000\t0100000A\t0003\t0\t0\t5\t00000000\t0\t0\t0\n"
    worse, refused = (
        default.replace("up.1", "up2").replace("\t5\t", "\t9\t"),
        default.replace("0003\t0\t0\t5", "0203\t0\t0\t1"),
    )
    session, other = (f"{link}\t0700D50A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n" for link in ("skb0", "br0"))

    def seen(text: str, forwarding: str = "1\n") -> tuple[Verdict, str, str]:
        routes.write_text(head + text)
        setting.write_text(forwarding)
        check = check_bridge_way("10.213.0.0/16", f"{tmp_path}/")
        return check.verdict, check.seen, check.fix

    assert seen(worse + default + session) == (Verdict.WORKS, "by up.1, with addresses of 10.213.0.0/16", "")
    assert "`ip route add default" in seen(refused + session)[2]
    assert "10.213.0.7/32" in seen(default + other)[1]
    assert "sysctl -w net.ipv4.conf.up.1.forwarding=1" in seen(default, "0\n")[2]


def test_a_data_directory_that_others_may_write_is_told(tmp_path: Path) -> None:
    """With the line that closes it, quoted."""
    directory = tmp_path / "with space"
    assert judge("data_dir_mode", Host(data_dir=directory)).verdict is Verdict.WORKS
    directory.mkdir()
    directory.chmod(0o777)
    check = judge("data_dir_mode", Host(data_dir=directory))
    assert (check.verdict, check.fix) == (Verdict.FALLS_BACK, f"`chmod go-w '{directory}'`")
    directory.chmod(0o770)
    assert judge("data_dir_mode", Host(data_dir=directory)).verdict is Verdict.FALLS_BACK
    directory.chmod(0o1770)  # as a daemon with a user of its own needs it
    assert judge("data_dir_mode", Host(data_dir=directory)).verdict is (
        Verdict.WORKS if os.geteuid() == 0 else Verdict.FALLS_BACK
    )


def test_space_is_measured_before_the_directory_exists(tmp_path: Path) -> None:
    """The file system of the nearest directory above is asked."""
    check = judge("space", Host(data_dir=tmp_path / "not" / "there"))
    assert "GiB free" in check.seen
    assert check.protection == ""


class _SilentDiag(socket.socket):
    """A socket of sock_diag that answers, and tells of no listener."""

    def recv(self, *_: int) -> bytes:
        return struct.pack("=IHHII4x", 20, 3, 0, 1, 0)  # NLMSG_DONE


@pytest.mark.parametrize("fault", ["Protocol not supported", "does not tell of a listening socket"])
def test_a_kernel_that_does_not_tell_of_listeners_is_told_with_the_fallback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str
) -> None:
    """`doctor` prints the other way that PID 1 takes, the cost, and the modules to load."""
    make = socket.socket

    def lesser(family: int = -1, *args: int, **kwargs: int) -> socket.socket:
        if family != socket.AF_NETLINK:
            return make(family, *args, **kwargs)
        if fault == "Protocol not supported":
            raise OSError(errno.EPROTONOSUPPORT, fault)
        return _SilentDiag(family, *args, **kwargs)

    monkeypatch.setattr(socket, "socket", lesser)
    answers = attempt({"socket_diag": network.socket_diag}, Room(str(tmp_path), is_thorough=False))
    check = examine._judge("socket_diag", answers["socket_diag"], Host())
    assert check.verdict is Verdict.FALLS_BACK
    assert fault in check.seen
    assert "/proc/net/tcp" in check.seen
    doctor._print_table(Machine(datetime.now(UTC), [check], {}))
    printed = capsys.readouterr().out
    assert printed.startswith("note  socket diagnosis")
    assert "modprobe -a inet_diag tcp_diag" in printed


def test_a_kernel_that_tells_of_listeners_works(tmp_path: Path) -> None:
    """The trial asks in the words of PID 1, and finds a socket of its own."""
    answers = attempt({"socket_diag": network.socket_diag}, Room(str(tmp_path), is_thorough=False))
    assert answers["socket_diag"]["verdict"] == "works"
