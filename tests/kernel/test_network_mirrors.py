"""Small packages are really installed by pip, npm and apt in sessions, from the mirrors that this machine is set to.

Run with `MIRRORS=1 make test ARGS=tests/kernel/test_network_mirrors.py`: what is sent leaves the machine. The hosts are
those of the machine's own settings, each tool being asked itself; private addresses among theirs are permitted.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import pytest
import trio

from sandkasten.app import open_supervisor
from sandkasten.config import Config, EgressSettings
from sandkasten.model import ExecSpec, SessionSpec
from sandkasten.model.network import EgressVerdict, Network, NetworkMode
from tests import debian
from tests.waiting import patience

pytestmark = [
    pytest.mark.mirrors,
    pytest.mark.skipif(os.environ.get("MIRRORS") != "1", reason="needs MIRRORS=1 and mirrors of packages"),
    pytest.mark.skipif(
        any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY")), reason="the mirrors are behind a proxy"
    ),
]

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
"""The bundle of the machine, which the `host` image has, with whatever authority the machine trusts besides."""


def asked(*command: str) -> str:
    """Return what a program of the machine prints, or skip the test."""
    try:
        return debian.run(*command).strip()
    except debian.Unavailable as reason:
        pytest.skip(f"no mirror: {reason}")


def rules_for(urls: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return rules that allow the hosts of these URLs, and a permit for each of their addresses that is private."""
    rules, permit = set(), set()
    for split in map(urlsplit, urls):
        if split.scheme not in ("http", "https") or split.hostname is None:
            pytest.skip("the packages of this machine come from no server")
        port = split.port or (443 if split.scheme == "https" else 80)
        rules.add(f"{split.hostname}:{port}")
        try:
            found = socket.getaddrinfo(split.hostname, port, type=socket.SOCK_STREAM)
        except OSError as error:
            pytest.skip(f"the mirror has no address: {error}")
        addresses = {ipaddress.ip_address(str(each[4][0])) for each in found}
        permit |= {str(ipaddress.ip_network(each)) for each in addresses if not each.is_global}
    return tuple(sorted(rules)), tuple(sorted(permit))


async def install(config: Config, urls: Iterable[str], script: str, *, user: str | None = None) -> str:
    """Run a script in a session that reaches the hosts of these URLs and nothing else; return its output."""
    rules, permit = rules_for(urls)
    async with open_supervisor(attrs.evolve(config, egress=EgressSettings(permit=permit))) as supervisor:
        session = await supervisor.create(SessionSpec(network=Network(NetworkMode.ALLOW, allow=rules)))
        with trio.fail_after(patience(300)):
            result = await supervisor.exec(session.id, ExecSpec(script, stateless=True, user=user))
        log = await supervisor.egress_log(session.id, verdict=EgressVerdict.DENIED)
        assert result.end.exit_code == 0, (result.output.decode(), log)
        return result.output.decode()


async def test_pip_installs_a_package(config: Config) -> None:
    """From the index of pip's settings, with the files wherever the index says they are."""
    settings = asked(sys.executable, "-m", "pip", "config", "list")
    match = re.search(r"\.index-url='([^']+)'", settings)
    default = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    index = match[1] if match else asked(sys.executable, "-c", default)
    where = ("--index-url", index, "--cert", CERTIFICATES)
    dry = ("install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", "six")
    report = json.loads(asked(sys.executable, "-m", "pip", "--isolated", *dry, *where))
    file = report["install"][0]["download_info"]["url"]
    script = f"python3 -m pip install --target /tmp/p {' '.join(where)} six && ls /tmp/p"
    assert "six.py" in await install(config, [index, file], script)


async def test_npm_installs_a_package(config: Config) -> None:
    """From the registry of npm's settings, with the archives wherever the registry says they are."""
    registry = asked("npm", "config", "get", "registry")
    tarball = asked("npm", "view", "ms", "dist.tarball")
    script = (
        f"mkdir /tmp/n && cd /tmp/n && npm_config_cafile={CERTIFICATES} npm install --registry {registry} ms && "
        "node -p 'require(\"ms\")(1000)'"
    )
    assert (await install(config, [registry, tarball], script)).endswith("1s\n")


async def test_apt_installs_a_package(config: Config) -> None:
    """From the sources of this release, whose signatures are checked."""
    try:
        sources = [Path(each) for each in debian.source().entries]
    except debian.Unavailable as reason:
        pytest.skip(str(reason))
    texts = {path.name: re.sub(r"(?m)^#.*\n", "", path.read_text()) for path in sources}
    urls = re.findall(r"https?://\S+", "\n".join(texts.values()))
    options = " ".join(
        f"-o {name}={value}"
        for name, value in re.findall(r'^(Acquire::Check-\S+) "(\S+)";', asked("apt-config", "dump"), re.M)
    )
    script = "\n".join(f"cat > /etc/apt/sources.list.d/{name} <<'EOF'\n{text}\nEOF" for name, text in texts.items())
    script += f"\napt-get {options} update && apt-get {options} install -y --no-install-recommends hello && hello"
    assert (await install(config, urls, script, user="root")).endswith("Hello, world!\n")
