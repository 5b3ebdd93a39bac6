"""Tools that expect a root, at work as the session's: package managers, accounts, archives. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.errors import InvalidRequest
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.model import ExecSpec, ProcessSpec, SessionSpec, ShellSpec, TerminalSize, WaitFor
from tests import debian

PACKAGE = r"""
set -e
mkdir -p /tmp/p/DEBIAN /tmp/p/usr/bin /tmp/p/var/lib/greeter
printf '%s\n' 'Package: greeter' 'Version: 1' 'Architecture: all' 'Maintainer: Nobody <nobody@example.org>' \
    'Description: says hello' > /tmp/p/DEBIAN/control
printf '%s\n' '#!/bin/sh' 'set -e' 'getent passwd greeter >/dev/null || useradd --system greeter' \
    'chown greeter:mail /var/lib/greeter' 'chmod 2770 /var/lib/greeter' > /tmp/p/DEBIAN/postinst
printf '%s\n' '#!/bin/sh' 'echo hello' > /tmp/p/usr/bin/greeter
chmod 755 /tmp/p/DEBIAN/postinst; chmod 4755 /tmp/p/usr/bin/greeter
dpkg-deb --build /tmp/p /tmp/greeter.deb >/dev/null
"""
DEPENDING = PACKAGE.replace("'Description:", "'Depends: adduser, libc6 (>= 2.1) | musl' 'Description:").replace(
    "getent passwd greeter >/dev/null || useradd --system greeter",
    "adduser --system --quiet --home /var/lib/greeter --no-create-home greeter",
)
SHOW = "stat -c '%U:%G %a' /var/lib/greeter /usr/bin/greeter; greeter\n"
SHOWN = ["greeter:mail", "2770", "root:root", "4755", "hello"]
USERS = r"""
useradd -m alice
su alice -c 'id -un; grep -c "Cap\(Prm\|Eff\|Amb\).*0000000000000000" /proc/self/status
echo x > ~/f; touch /etc/no 2>&1 | wc -l'
tar -C / -cpf /tmp/t.tar home/alice var/lib/greeter
mkdir /tmp/x; tar -C /tmp/x -xpf /tmp/t.tar
stat -c '%U:%G %a' /tmp/x/home/alice/f /tmp/x/var/lib/greeter
"""
WHEEL = r"""
import zipfile
files = {
    "rooted.py": "WORD = 'installed'\n",
    "rooted-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: rooted\nVersion: 1\n",
    "rooted-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
files["rooted-1.dist-info/RECORD"] = "".join(f"{name},,\n" for name in (*files, "rooted-1.dist-info/RECORD"))
with zipfile.ZipFile("/tmp/rooted-1-py3-none-any.whl", "w") as wheel:
    for name, text in files.items():
        wheel.writestr(name, text)
"""


def is_outside(path: str) -> bool:
    """Return whether the machine itself has such a file."""
    return Path(path).exists()


async def test_debian_installs_packages_and_makes_users(supervisor: LocalSupervisor, config: Config) -> None:
    """apt-get, which drops to a user of its own for a while, dpkg, useradd, su and tar do all they are asked."""
    try:
        tar = debian.minbase_tar()
    except debian.Unavailable as reason:
        pytest.skip(str(reason))
    import_tar(Catalog(config.data_dir), "debian", tar)
    session = await supervisor.create(SessionSpec(image="debian", user="root"))
    assert (session.options.user, session.options.root_inside) == ("root", True)

    async def lines(script: str) -> list[str]:
        result = await supervisor.exec(session.id, ExecSpec(script))
        assert result.end.exit_code == 0, result.output.decode()
        return result.stdout.decode().split()

    await lines(PACKAGE)
    await lines("apt-get install -y /tmp/greeter.deb")
    assert await lines(SHOW) == SHOWN
    await lines("apt-get purge -y greeter; dpkg -i /tmp/greeter.deb")
    assert await lines(SHOW) == SHOWN
    assert await lines(USERS) == ["alice", "3", "1", "alice:alice", "644", "greeter:mail", "2770"]
    user = await supervisor.exec(session.id, ExecSpec("id -un; greeter; id -u", stateless=True, user="alice"))
    assert user.stdout.split() == [b"alice", b"hello", b"1001"]
    await supervisor.destroy(session.id)


async def test_the_host_image_takes_packages_and_users(supervisor: LocalSupervisor) -> None:
    """A local package whose dependencies the machine has is installed by dpkg and by apt, in silence; adduser, chpasswd
    and su work. Without a network apt says so."""
    if shutil.which("dpkg-deb") is None or shutil.which("adduser") is None:
        pytest.skip("needs a Debian machine")
    session = await supervisor.create(SessionSpec())

    async def lines(script: str, *, exit_code: int = 0, user: str = "root") -> list[str]:
        result = await supervisor.exec(session.id, ExecSpec(script, stateless=True, user=user))
        assert result.end.exit_code == exit_code, result.output.decode()
        return result.output.decode().splitlines()

    await lines(DEPENDING)
    assert not [line for line in await lines("dpkg -i /tmp/greeter.deb") if "warning" in line]
    assert await lines("greeter; dpkg -S /usr/bin/greeter", user="1000") == ["hello", "greeter: /usr/bin/greeter"]
    await lines("apt-get purge -y greeter; test ! -e /usr/bin/greeter; apt-get install -y /tmp/greeter.deb")
    assert await lines("greeter", user="1000") == ["hello"]
    assert not [line for line in await lines("apt-get check") if line[:2] in ("W:", "E:")]
    await lines("adduser --disabled-password --gecos '' alice; echo alice:secret | chpasswd")
    assert await lines("su alice -c 'id -un; ls -A ~'") == ["alice", *sorted(os.listdir("/etc/skel"))]
    assert "This sandbox has no network" in "\n".join(await lines("apt-get update", exit_code=100))
    assert not is_outside("/usr/bin/greeter")
    await supervisor.destroy(session.id)


async def test_pip_installs_into_the_machine_s_python(supervisor: LocalSupervisor) -> None:
    """In the `host` image, by one exec as root: the installed module is found by every user inside, and not outside."""
    session = await supervisor.create(SessionSpec())
    if (await supervisor.exec(session.id, ExecSpec("python3 -m pip --version"))).end.exit_code:
        pytest.skip("needs pip in the machine's /usr")
    await supervisor.exec(session.id, ExecSpec(argv=("python3", "-c", WHEEL)))
    command = (
        "python3 -m pip install --no-index --no-deps --root-user-action=ignore /tmp/rooted-1-py3-none-any.whl 2>&1"
    )
    refused = await supervisor.exec(session.id, ExecSpec("touch /usr/local/lib/x", stateless=True))
    assert refused.end.exit_code != 0
    done = await supervisor.exec(session.id, ExecSpec(command, stateless=True, user="root"))
    assert done.end.exit_code == 0, done.output.decode()
    seen = await supervisor.exec(
        session.id, ExecSpec("cd /tmp; python3 -c 'import rooted as r; print(r.WORD, r.__file__)'")
    )
    word, path = seen.stdout.decode().split()
    assert word == "installed"
    assert path.startswith("/usr/")
    assert not is_outside(path)
    await supervisor.destroy(session.id)


async def test_each_kind_of_run_can_be_roots(supervisor: LocalSupervisor) -> None:
    """Commands, processes, shells and terminals can run as root in a session whose user is the sandbox's."""
    session = await supervisor.create(SessionSpec())
    command = await supervisor.exec(session.id, ExecSpec(argv=("id", "-u"), user="0:0"))
    assert command.output == b"0\n"
    process = await supervisor.start_process(session.id, ProcessSpec(argv=("sh", "-c", "id -u > /tmp/p"), user="root"))
    ended = await supervisor.wait_process(session.id, process.exec_id, WaitFor(exit=True), timeout_s=20)
    assert ended.happened
    await supervisor.open_shell(session.id, ShellSpec("admin", user="root"))
    shell = await supervisor.exec(session.id, ExecSpec("cat /tmp/p; cd /root; id -u; echo $HOME", shell="admin"))
    assert shell.output.split() == [b"0", b"0", b"/root"]
    assert (await supervisor.exec(session.id, ExecSpec("pwd", shell="admin"))).output == b"/root\n"
    screen = await supervisor.exec(session.id, ExecSpec("id -u; tty", shell="admin", terminal=TerminalSize()))
    assert screen.output.split()[0] == b"0"
    assert (await supervisor.exec(session.id, ExecSpec("id -u"))).output == b"1000\n"
    await supervisor.destroy(session.id)


async def test_root_is_refused_where_it_was_ruled_out(supervisor: LocalSupervisor) -> None:
    """A session made without the possibility neither starts as root nor runs anything as root."""
    with pytest.raises(InvalidRequest) as refused:
        await supervisor.create(SessionSpec(user="root", root_inside=False))
    assert refused.value.details == {"user": "can't be used"}
    session = await supervisor.create(SessionSpec(root_inside=False))
    for spec in (ExecSpec(argv=("id",), user="root"), ExecSpec(argv=("id",), user="0:0")):
        with pytest.raises(InvalidRequest):
            await supervisor.exec(session.id, spec)
    with pytest.raises(InvalidRequest):
        await supervisor.open_shell(session.id, ShellSpec("admin", user="root"))
    await supervisor.destroy(session.id)
