"""Images of Debian packages: builds that fail or are broken off, and sessions on what the shipped recipes make.

The latter need packages: `MIRRORS=1 make test ARGS=tests/kernel/test_recipes.py`. What was made once is kept in the
user's cache until its recipe changes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandkasten.cli.main import main
from sandkasten.config import Config
from sandkasten.crash import Crash
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import publish_layer
from sandkasten.images.layers import open_store
from sandkasten.model import SessionSpec
from tests import debian
from tests.kernel import tool_servers as servers
from tests.kernel.harness import wait_until
from tests.kernel.test_network import SITE, served
from tests.kernel.test_network_tools import ALLOWED, APT, ENV, NAMES, Inside
from tests.kernel.world import World, world
from tests.waiting import patience

needs_mmdebstrap = pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="needs mmdebstrap")
PYTHON = r"""
python -m venv /tmp/v && /tmp/v/bin/python -m pip --version >/dev/null && echo venv
mkdir /tmp/g && cd /tmp/g && git init -q . && ls -d .git
echo needle > hay && rg -l needle
printf '#include <stdio.h>\nint main(void) { puts("compiled"); }\n' > h.c && gcc h.c -o h && ./h
python3 -c 'import locale, sys; print(sys.stdout.encoding, locale.getpreferredencoding(), len("grün"))'
"""
PEOPLE = r"""
id -un; echo $HOME; cd && pwd && stat -c %U . && touch here
command -v sudo || echo no sudo
printf 'gr\303\274n' | wc -m; locale charmap
curl --version | head -c 4; echo; ls /etc/ssl/certs/ca-certificates.crt
ls /etc/hostname; test ! -e /usr/share/locale/de
"""
PEOPLE_SEE = ["user", "/home/user", "/home/user", "user", "no sudo", "4", "UTF-8", "curl",
              "/etc/ssl/certs/ca-certificates.crt", "/etc/hostname"]  # fmt: skip
INDEX = "https://python.example/simple/"


def build(data_dir: Path, directory: Path, mirror: str) -> subprocess.Popen[str]:
    """Begin a build in a process of its own, with its temporary files in a directory."""
    where = ("--data-dir", str(data_dir), "--name", "x", "--from", "debian:bookworm", "--mirror", mirror)
    return subprocess.Popen(
        [sys.executable, "-m", "sandkasten", "image", "build", *where],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory), "NO_PROXY": "*"},
    )


def left(data_dir: Path) -> list[str]:
    """Return what there is of layers, and of images but `host`."""
    layers = [path.name for path in (data_dir / "layers").glob("*")]
    return layers + [image.name for image in Catalog(data_dir).images() if image.name != "host"]


@needs_mmdebstrap
def test_a_build_whose_packages_cant_be_had_says_why(config: Config, tmp_path: Path) -> None:
    """With the words of apt; nothing of it is left."""
    process = build(config.data_dir, tmp_path, f"file://{tmp_path}/none")
    said = process.communicate(timeout=patience(60))[1]
    assert process.returncode == 1
    assert "x: reading lists of packages\n" in said
    assert re.search(r"sandkasten: mmdebstrap failed: The repository .*file:/\S+/none", said), said
    assert "Traceback" not in said
    assert left(config.data_dir) == []
    assert list(tmp_path.iterdir()) == []


@needs_mmdebstrap
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_ended_takes_its_programs_along(config: Config, tmp_path: Path, number: signal.Signals) -> None:
    """apt waits for a mirror that says nothing: its connection ends, so its process has ended."""
    with socket.create_server(("127.0.0.1", 0)) as mirror:
        mirror.settimeout(patience(60))
        process = build(config.data_dir, tmp_path, f"http://127.0.0.1:{mirror.getsockname()[1]}/")
        connection = mirror.accept()[0]
        with connection:
            process.send_signal(number)
            said = process.communicate(timeout=patience(60))[1]
            connection.settimeout(patience(60))
            while connection.recv(65536):
                pass
    assert process.returncode == (-number if number is signal.SIGKILL else 130)
    assert "Traceback" not in said
    wait_until(lambda: not left(config.data_dir), "the layer that was begun is gone, by nsinit")
    assert number is signal.SIGKILL or list(tmp_path.iterdir()) == []


# What the shipped recipes make

needs_mirrors = pytest.mark.skipif(os.environ.get("MIRRORS") != "1", reason="needs MIRRORS=1 and mirrors of packages")


def add(config: Config, name: str) -> None:
    """Have the image that a shipped recipe makes."""
    try:
        tar, recipe = debian.recipe_tar(name)
    except debian.Unavailable as reason:
        pytest.skip(f"no mirror: {reason}")
    catalog = Catalog(config.data_dir)
    with tar.open("rb") as file, open_store(config.data_dir) as store:
        layer = store.unpack_layer(file.fileno())
        publish_layer(catalog, store, name, layer, source=name, config=recipe.config, crash=Crash())


@asynccontextmanager
async def session_on(name: str, config: Config, outside: World, authority: servers.Authority) -> AsyncIterator[Inside]:
    """A session on an image with the defaults, whose network leads to servers of the test."""
    async with served(config, outside) as supervisor:
        inside = Inside(supervisor, await supervisor.create(SessionSpec(image=name, network=ALLOWED, env=ENV)))
        await inside.run(f"echo {shlex.quote(authority.certificate)} > /tmp/ca.pem")
        yield inside


@pytest.fixture
def authority(tmp_path: Path) -> servers.Authority:
    return servers.Authority(tmp_path, *NAMES)


@needs_mirrors
@pytest.mark.mirrors
async def test_the_command_makes_the_base(config: Config, tmp_path: Path, authority: servers.Authority) -> None:
    """By one command, with the user, home and language of the recipe, and packages by apt as root."""
    assert main(["image", "build", "--recipe", "base", "--data-dir", str(config.data_dir)]) == 0
    with world(tmp_path, f"{SITE}/32") as outside:
        outside.name(dict.fromkeys(NAMES, SITE))
        outside.serve(SITE, 80, servers.debian_archive(tmp_path / "archive"))
        async with session_on("base", config, outside, authority) as inside:
            assert (await inside.run(PEOPLE)).splitlines() == PEOPLE_SEE
            await inside.run("rm /etc/apt/sources.list.d/*; " + APT.format("http://debian.example"), user="root")
            assert await inside.run("greeter; id -u", user="root") == "installed\n0\n"


@needs_mirrors
@pytest.mark.mirrors
async def test_python_installs_and_compiles(config: Config, tmp_path: Path, authority: servers.Authority) -> None:
    """A virtual environment, a compiler, git and ripgrep are there; pip installs for the user and for root."""
    add(config, "python")
    with world(tmp_path, f"{SITE}/32") as outside:
        outside.name(dict.fromkeys(NAMES, SITE))
        outside.serve(SITE, 443, authority.over_tls(servers.python_index()))
        async with session_on("python", config, outside, authority) as inside:
            shown = (await inside.run(PYTHON)).splitlines()
            assert shown == ["venv", ".git", "hay", "compiled", "utf-8 UTF-8 4"]
            show = "cd /tmp; python -c 'import greeter; print(greeter.__file__)'"
            await inside.run(f"pip install -q --index-url {INDEX} greeter")
            assert (await inside.run(show)).startswith("/home/user/.local/lib/")
            await inside.run(f"pip install -q --root-user-action=ignore --index-url {INDEX} greeter", user="root")
            assert (await inside.run(show, user="root")).startswith("/usr/local/lib/")


@needs_mirrors
@pytest.mark.mirrors
async def test_node_installs(config: Config, tmp_path: Path, authority: servers.Authority) -> None:
    """npm installs a package of a project, and one for the user whatever the project, without root."""
    add(config, "node")
    with world(tmp_path, f"{SITE}/32") as outside:
        outside.name(dict.fromkeys(NAMES, SITE))
        outside.serve(SITE, 443, authority.over_tls(servers.npm_registry("https://npm.example")))
        async with session_on("node", config, outside, authority) as inside:
            install = "npm install --no-audit --no-fund --registry https://npm.example/ greeter"
            await inside.run(f"mkdir /tmp/n && cd /tmp/n && {install}")
            assert await inside.run("cd /tmp/n && node -p 'require(\"greeter\")'") == "installed\n"
            await inside.run(f"cd /tmp && {install} --global")
            assert await inside.run("npm root --global && ls /home/user/.local/lib/node_modules") == (
                "/home/user/.local/lib/node_modules\ngreeter\n"
            )
