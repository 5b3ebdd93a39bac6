"""Findings of `sandkasten security`: each rule on a value that is fine and on one that is weak."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandkasten.config import (
    Config,
    Defaults,
    DiskSettings,
    EgressSettings,
    IsolationSettings,
    RunsSettings,
    SecuritySettings,
    ServerSettings,
)
from sandkasten.host.account import Account
from sandkasten.security import posture
from sandkasten.security.posture import Finding, Severity, high, in_order, low, medium

GOOD_KEY = "q3ZrT8vXk1LwYbN5sJ7dFgHcPmA2eR9u"


def ids(findings: list[Finding]) -> list[str]:
    return [each.id for each in findings]


def of_settings(config: Config) -> list[str]:
    size = {"memory_bytes": 64 << 30, "cpus": 8, "free_bytes": 1 << 40}
    return ids(list(posture.check_settings(config, **size)))


def test_the_defaults_are_clean() -> None:
    """A configuration that says nothing has no finding."""
    assert of_settings(Config()) == []


@pytest.mark.parametrize(
    ("address", "found"),
    [
        *[(each, False) for each in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/s")],
        *[(each, True) for each in ("0.0.0.0:1", "[::]:1", "192.168.1.5:1", "example.org:1", "localhost.evil:1")],
    ],
)
def test_beyond_loopback_is_a_finding(address: str, found: bool) -> None:
    """Names count as what they say, not as what they resolve to today."""
    assert bool(list(posture.check_address(address))) is found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(api_key="hunter2"), ["key.weak"]),
        (Config(api_key="a" * 64), ["key.weak"]),
        (Config(api_key=GOOD_KEY), []),
        (Config(allowed_origins=("http://example.org",)), ["origins.plain-http"]),
        (Config(allowed_origins=("http://localhost:3000", "https://example.org")), []),
        (Config(security=SecuritySettings(seccomp="off")), ["seccomp.off"]),
        (Config(security=SecuritySettings(seccomp="mvp")), ["seccomp.weak"]),
        (Config(defaults=Defaults(network_mode="open")), ["network.open"]),
        (Config(egress=EgressSettings(max_mode="allow", permit=("192.0.2.7/32",))), []),
        (Config(egress=EgressSettings(permit=("192.0.2.7/32",))), ["egress.open-permit"]),
        (Config(egress=EgressSettings(max_mode="allow", permit=("10.0.0.0/8",))), ["egress.permit-wide"]),
        (Config(egress=EgressSettings(max_mode="allow", permit=("fd00::/8",))), ["egress.permit-wide"]),
        (Config(egress=EgressSettings(max_mode="allow", permit=("127.0.0.1/32",))), ["egress.permit-node"]),
        (Config(egress=EgressSettings(max_mode="allow", permit=("0.0.0.0/0",))), ["egress.permit-node"]),
        (Config(egress=EgressSettings(max_mode="none", permit=("0.0.0.0/0",))), []),
        (Config(egress=EgressSettings(groups={"a": ("*.example.org", "192.0.2.0/24")})), []),
        (Config(egress=EgressSettings(groups={"a": ("*.org",), "b": ("10.0.0.0/8",)})), ["egress.group-wide"] * 2),
        (Config(isolation=IsolationSettings(allow_missing=("seccomp",))), ["isolation.allow-missing"]),
        (Config(disk=DiskSettings(mode="none")), ["disk.none"]),
        (Config(disk=DiskSettings(mode="tmpfs")), []),
        (Config(server=ServerSettings(log_level="debug")), ["log.debug"]),
        (Config(runs=RunsSettings(allow_unlimited=True)), ["runs.unlimited"]),
        (Config(defaults=Defaults(mem_limit_mb=40 << 10)), ["limits.memory"]),
        (Config(defaults=Defaults(pids_limit=100_000)), ["limits.pids"]),
        (Config(defaults=Defaults(cpu_limit=16)), ["limits.cpu"]),
        (Config(defaults=Defaults(disk_limit_mb=2 << 20)), ["limits.disk"]),
    ],
)
def test_a_setting_that_weakens_is_a_finding(config: Config, expected: list[str]) -> None:
    """A setting that weakens nothing is no finding."""
    assert of_settings(config) == expected


def test_a_key_file_must_be_its_owners_alone(tmp_path: Path) -> None:
    """Mode, kind and absence are told apart."""
    path = tmp_path / "api-key"
    assert list(posture.check_key_file(path)) == []
    path.write_text(GOOD_KEY)
    path.chmod(0o600)
    assert list(posture.check_key_file(path)) == []
    path.chmod(0o640)
    assert ids(list(posture.check_key_file(path))) == ["key.mode"]
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert ids(list(posture.check_key_file(path))) == ["key.not-a-file"]


def test_a_configuration_that_others_may_change_or_read(tmp_path: Path) -> None:
    """Reading is a finding only where a key may be in it."""
    path = tmp_path / "s.yaml"
    path.write_text("")
    for mode, holds_key, expected in (
        *((0o600, True, []), (0o644, False, [])),
        *((0o644, True, ["config.readable"]), (0o666, False, ["config.writable"])),
    ):
        path.chmod(mode)
        found = [each for each in posture.check_config_file(path, holds_key=holds_key) if each.id != "config.directory"]
        assert ids(found) == expected, oct(mode)


def test_a_data_directory_that_others_enter_or_replace(tmp_path: Path) -> None:
    """The mode of the data directory counts, and that of everything above it. In a sticky directory others can't rename
    it.
    """
    above = tmp_path / "above"
    data = above / "data"
    data.mkdir(parents=True)
    data.chmod(0o700)
    above.chmod(0o1777)
    assert list(posture.check_directory(data)) == []
    data.chmod(0o755)
    assert ids(list(posture.check_directory(data))) == ["data.mode"]
    data.chmod(0o700)
    above.chmod(0o777)
    assert ids(list(posture.check_directory(data))) == ["data.above"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_what_belongs_to_the_daemons_own_user_is_no_finding(tmp_path: Path) -> None:
    """The key is its file, and its group makes files in root's sticky directory; no other user's, no other group's."""
    daemon, other = Account(61100, 61100, "61100"), Account(61101, 61101, "61101")
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 0, daemon.gid)
    data.chmod(0o1770)
    key = data / "api-key"
    key.touch(0o600)
    os.chown(key, daemon.uid, daemon.gid)
    assert [*posture.check_key_file(key, daemon), *posture.check_directory(data, daemon)] == []
    assert ids([*posture.check_key_file(key, other), *posture.check_directory(data, other)]) == [
        "key.mode",
        "data.mode",
    ]
    data.chmod(0o770)
    assert ids(list(posture.check_directory(data, daemon))) == ["data.mode"]


def test_setuid_files_of_an_image_are_found(tmp_path: Path) -> None:
    """Regular files only, by their path inside."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/su").write_text("")
    (tmp_path / "bin/ok").write_text("")
    os.chmod(tmp_path / "bin/su", 0o4755)
    (tmp_path / "bin/link").symlink_to("su")
    assert posture.privileged_files(tmp_path) == ["/bin/su"]


def test_the_machine_is_read_below_a_root(tmp_path: Path) -> None:
    """Bad sysctls, a piped core_pattern, swap, open processor flaws and a shared disk; with the command that helps."""
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    files = {
        proc / "sys/kernel/unprivileged_bpf_disabled": "0\n",
        proc / "sys/kernel/randomize_va_space": "2\n",
        proc / "sys/kernel/perf_event_paranoid": "-1\n",
        proc / "sys/kernel/core_pattern": "|/usr/lib/handler %P\n",
        proc / "swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n",
        proc / "self/mountinfo": "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n",
        sys / "devices/system/cpu/vulnerabilities/meltdown": "Vulnerable\n",
        sys / "devices/system/cpu/vulnerabilities/mds": "Mitigation: Clear CPU buffers\n",
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    found = {each.id: each for each in posture.check_machine(tmp_path, f"{tmp_path}/")}
    assert set(found) == {
        *("sysctl.kernel.unprivileged_bpf_disabled", "sysctl.kernel.perf_event_paranoid", "core.pipe", "swap.on"),
        *("cpu.vulnerable", "data.mount", "data.on-root"),
    }
    assert found["sysctl.kernel.unprivileged_bpf_disabled"].fix == "`sysctl -w kernel.unprivileged_bpf_disabled=1`"
    assert "meltdown" in found["cpu.vulnerable"].what
    assert "mds" not in found["cpu.vulnerable"].what


def test_a_machine_without_any_of_it_has_no_finding(tmp_path: Path) -> None:
    """A file of the kernel that can't be read gives no finding."""
    assert list(posture.check_machine(tmp_path, f"{tmp_path}/")) == []


def test_the_gravest_come_first() -> None:
    """Otherwise the order stays."""
    found = [low("a", "", "", ""), high("b", "", "", ""), medium("c", "", "", ""), high("d", "", "", "")]
    assert ids(in_order(found)) == ["b", "d", "c", "a"]
    assert [each.severity for each in in_order(found)][-1] is Severity.LOW
