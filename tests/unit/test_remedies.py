"""Fixes name commands that exist on this machine, or say how to get them."""

from __future__ import annotations

import errno
import shlex
import subprocess
from pathlib import Path

import attrs
import pytest

from sandkasten.cli.main import main
from sandkasten.config import Config, Defaults
from sandkasten.host.checks import CATALOGUE, POOLS, SYSCTLS, Host, advise, check_pools, check_sysctls, fails
from sandkasten.host.remedies import COMMAND, PACKAGES, SEARCH_PATH, find_program, runnable
from sandkasten.security import posture

_HOSTS = (
    Host(),
    Host(container="podman", status="Seccomp:\t2\n"),
    Host(sysctls={"user.max_net_namespaces": "0"}),
    Host(sysctls={"kernel.apparmor_restrict_unprivileged_userns": "1"}),
)


def _fixes(tmp_path: Path) -> set[str]:
    """Return the fixes of every check and of the findings of a careless installation."""
    bad = Host(sysctls={each.name: str(each.at_most + 1) for each in SYSCTLS} | {each.name: "1" for each in POOLS})
    advised = [
        fails(check_id, "", fix=advise(check_id, number, host))
        for check_id in CATALOGUE
        for number in (errno.EPERM, errno.ENOSYS)
        for host in _HOSTS
    ]
    judged = [row.read(Host(data_dir=tmp_path)) for row in CATALOGUE.values() if row.read is not None]
    checks = [*advised, *judged, *map(fails, CATALOGUE, CATALOGUE), *check_sysctls(bad), *check_pools(bad, 1000, 256)]
    data = tmp_path / "with space"
    data.mkdir(mode=0o777)
    data.chmod(0o777)
    (data / "api-key").touch()
    (data / "api-key").chmod(0o666)
    config = Config(data_dir=data, listen=("0.0.0.0:80",), defaults=attrs.evolve(Defaults(), pids_limit=9999))
    findings = [
        *posture.find_weaknesses(config, data / "api-key"),
        *posture.check_core_pattern("|handler"),
        *posture.check_swap("name\n/dev/vdz partition"),
    ]
    return {each.fix for each in checks} | {each.fix for each in findings}


def _exists(word: str) -> bool:
    """Whether root's shell knows the command, as a program or of itself."""
    looked = ["/bin/sh", "-c", 'command -v "$1"', "sh", word]
    return subprocess.run(looked, env={"PATH": SEARCH_PATH}, capture_output=True, check=False).returncode == 0


def test_every_fix_can_be_typed_here(tmp_path: Path) -> None:
    """The first word of each command is a program of this machine or the shell's, `sandkasten` takes the arguments, and
    a program that is missing comes behind the command that installs its package.
    """
    seen = set()
    for fix in _fixes(tmp_path):
        commands = [shlex.split(each) for found in COMMAND.findall(fix) for each in found.split("; ")]
        for number, (word, *rest) in enumerate(commands):
            name = Path(word).name
            seen.add(name)
            if name == "sandkasten":
                with pytest.raises(SystemExit) as ended:
                    main([*rest, "--help"])
                assert ended.value.code == 0, fix
            installed = {each[-1] for each in commands[:number]}
            assert _exists(word) or PACKAGES.get(word) in installed, fix
    assert seen >= {"sandkasten", "sysctl", "chmod", "chown", "date", "modprobe", "tune2fs", "ulimit", "rm"}


def test_a_fix_with_a_package_names_no_other_systems_installer() -> None:
    """Every installer that a fix could name is this machine's."""
    assert find_program("sh")
    for package in set(PACKAGES.values()):
        (command,) = COMMAND.findall(runnable(f"`apt-get install {package}`")) or ("sh",)
        assert find_program(command.split()[0])


@pytest.mark.parametrize(
    ("there", "shown"),
    [
        ({"sysctl"}, "`sysctl -w a=1` in time"),
        ({"apt-get"}, "`apt-get install procps`, then `sysctl -w a=1` in time"),
        ({"dnf"}, "`dnf install procps-ng`, then `sysctl -w a=1` in time"),
        ({"apk"}, "`apk add procps`, then `sysctl -w a=1` in time"),
        (set(), "install the package procps, then `sysctl -w a=1` in time"),
    ],
)
def test_a_missing_command_is_installed_in_the_words_of_the_machine(there: set[str], shown: str) -> None:
    """Where no package manager is known, the package is named."""
    assert runnable("`sysctl -w a=1` in time", {name: name for name in there}.get) == shown


def test_our_own_command_is_named_by_its_place_where_root_would_not_find_it() -> None:
    """A virtual environment is on no search path."""
    (command,) = COMMAND.findall(runnable("`sandkasten doctor --fix`", lambda _name: None))
    place, rest = command.split(" ", 1)
    assert (Path(place).is_file(), rest) == (True, "doctor --fix")
    assert runnable("`sandkasten doctor`", lambda name: name) == "`sandkasten doctor`"
