"""Programs that people use a network with, inside a session with the defaults and without settings of a proxy: package
managers, git, curl, node, clients of databases, each against a server of the test's own."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.model import ExecSpec, Session, SessionPatch, SessionSpec
from sandkasten.model.network import Network, NetworkMode
from tests.kernel import tool_servers as servers
from tests.kernel.test_network import SITE, served
from tests.kernel.world import World, http, world
from tests.waiting import patience

NAMES = tuple(f"{name}.example" for name in ("site", "python", "npm", "debian", "git", "database", "cache"))
ALLOWED = Network(
    NetworkMode.ALLOW,
    allow=[*NAMES[:4], "git.example:22,80,443,9418", "database.example:5432", "cache.example:6379,6380"],
)
ENV = dict.fromkeys(
    ("PIP_CERT", "npm_config_cafile", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE"), "/tmp/ca.pem"
)

PIP = "python3 -m pip install --no-cache-dir --index-url https://python.example/simple/ --target /tmp/p greeter"
NPM = "mkdir -p /tmp/n && cd /tmp/n && npm install --no-audit --no-fund --registry https://npm.example/ greeter"
APT = (
    "echo 'deb [trusted=yes] {} ./' > /etc/apt/sources.list\n"
    "apt-get -o Acquire::https::CAInfo=/tmp/ca.pem update && "
    "apt-get -o Acquire::https::CAInfo=/tmp/ca.pem install -y greeter"
)
FETCH = "fetch('https://site.example/').then(r => r.text()).then(console.log)"
PING = """
import socket
with socket.create_connection(("cache.example", 6379)) as s:
    s.sendall(b"PING\\r\\n")
    print(s.recv(100))
"""


class Inside:
    """A session of the test's."""

    def __init__(self, supervisor: LocalSupervisor, session: Session) -> None:
        self.supervisor, self.session = supervisor, session

    async def run(self, script: str, user: str | None = None) -> str:
        """Run a script and return what it prints, once it succeeds."""
        with trio.fail_after(patience(90)):
            spec = ExecSpec(script, stateless=True, user=user)
            result = await self.supervisor.exec(self.session.id, spec)
        log = await self.supervisor.egress_log(self.session.id)
        assert result.end.exit_code == 0, (result.output.decode(), log)
        return result.output.decode()

    async def need(self, *programs: str) -> None:
        """Skip the test if the machine's `/usr`, which the session sees, lacks one of these."""
        for each in programs:
            if "none" in await self.run(f"command -v {each} || echo none"):
                pytest.skip(f"needs {each} in the machine's /usr")

    async def change(self, network: Network) -> None:
        """Replace the session's network."""
        await self.supervisor.update(self.session.id, SessionPatch(network=network))


@pytest.fixture
def authority(tmp_path: Path) -> servers.Authority:
    return servers.Authority(tmp_path, *NAMES)


@pytest.fixture
def outside(tmp_path: Path, authority: servers.Authority) -> Iterator[World]:
    with world(tmp_path, f"{SITE}/32") as made:
        made.name(dict.fromkeys(NAMES, SITE))
        yield made


@pytest.fixture
async def inside(config: Config, outside: World, authority: servers.Authority) -> AsyncIterator[Inside]:
    """A session whose programs are told of the authority."""
    async with served(config, outside) as supervisor:
        made = Inside(supervisor, await supervisor.create(SessionSpec(network=ALLOWED, env=ENV)))
        await made.run(f"echo {shlex.quote(authority.certificate)} > /tmp/ca.pem")
        yield made


async def test_pip_installs_from_an_index(inside: Inside, outside: World, authority: servers.Authority) -> None:
    """Over TLS, told of the certificate alone."""
    await inside.need("pip")
    outside.serve(SITE, 443, authority.over_tls(servers.python_index()))
    await inside.run(PIP)
    assert await inside.run("PYTHONPATH=/tmp/p python3 -c 'import greeter; print(greeter.WORD)'") == "installed\n"


async def test_npm_installs_from_a_registry(inside: Inside, outside: World, authority: servers.Authority) -> None:
    """Over TLS, told of the certificate alone."""
    await inside.need("npm")
    outside.serve(SITE, 443, authority.over_tls(servers.npm_registry("https://npm.example")))
    await inside.run(NPM)
    assert await inside.run("cd /tmp/n && node -p 'require(\"greeter\")'") == "installed\n"


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_apt_installs_from_an_archive(
    inside: Inside, outside: World, authority: servers.Authority, tmp_path: Path, scheme: str
) -> None:
    """As the session's root, by its user of its own that downloads."""
    await inside.need("apt-get")
    archive = servers.debian_archive(tmp_path)
    outside.serve(SITE, 80 if scheme == "http" else 443, archive if scheme == "http" else authority.over_tls(archive))
    await inside.run(APT.format(f"{scheme}://debian.example"), user="root")
    assert await inside.run("greeter") == "installed\n"


async def test_git_clones_and_pushes_over_https(
    inside: Inside, outside: World, authority: servers.Authority, tmp_path: Path
) -> None:
    """By the protocol of git's own server."""
    await inside.need("git")
    outside.serve(SITE, 443, authority.over_tls(servers.git_over_http(servers.git_repository(tmp_path))))
    await inside.run("git clone -q https://git.example/greeter.git /tmp/g")
    assert await inside.run("cat /tmp/g/word") == "installed\n"
    await inside.run("cd /tmp/g && git -c user.name=a -c user.email=b commit -q --allow-empty -m x && git push -q")
    assert (await inside.run("git ls-remote https://git.example/greeter.git main")).split()[0] == (
        await inside.run("cd /tmp/g && git rev-parse HEAD")
    ).strip()


async def test_git_clones_over_ssh(inside: Inside, outside: World, tmp_path: Path) -> None:
    """Client and server both speak first, and the server is who the client knows."""
    await inside.need("git", "ssh")
    server, key, known = servers.ssh_server(tmp_path)
    outside.serve(SITE, 22, server)
    root = servers.git_repository(tmp_path)
    await inside.run(
        f"mkdir -m 700 -p ~/.ssh && echo {shlex.quote(key)} > ~/.ssh/id_ed25519 && chmod 600 ~/.ssh/id_ed25519\n"
        f"echo {shlex.quote(known)} > ~/.ssh/known_hosts"
    )
    await inside.run(f"git clone -q ssh://root@git.example{root}/greeter.git /tmp/g")
    assert await inside.run("cat /tmp/g/word") == "installed\n"


async def test_git_clones_over_its_own_protocol(inside: Inside, outside: World, tmp_path: Path) -> None:
    """A protocol in plain text that is no HTTP."""
    await inside.need("git")
    outside.serve(SITE, 9418, servers.git_daemon(servers.git_repository(tmp_path)))
    await inside.run("git clone -q git://git.example/greeter.git /tmp/g")
    assert await inside.run("cat /tmp/g/word") == "installed\n"


async def test_curl_and_node_fetch(inside: Inside, outside: World, authority: servers.Authority) -> None:
    """Over plain HTTP and over TLS."""
    await inside.need("curl", "node")
    outside.serve(SITE, 80, http(b"plain"))
    outside.serve(SITE, 443, authority.over_tls(http(b"secret")))
    assert await inside.run("curl -sS http://site.example/") == "plain"
    assert await inside.run("curl -sS https://site.example/") == "secret"
    assert await inside.run(f'node -e "{FETCH}"') == "secret\n"


async def test_psql_asks_for_tls_in_its_own_way(inside: Inside, outside: World, authority: servers.Authority) -> None:
    """TLS comes after the first bytes of the connection, and the client checks the name itself."""
    await inside.need("psql")
    outside.serve(SITE, 5432, servers.postgres(authority))
    where = "host=database.example user=u dbname=d sslmode=verify-full sslrootcert=/tmp/ca.pem"
    assert await inside.run(f"psql '{where}' -Atc 'select word'") == "installed\n"


async def test_redis_answers_both_kinds_of_command(
    inside: Inside, outside: World, authority: servers.Authority
) -> None:
    """An array of words or a line, and over TLS that names the server."""
    outside.serve(SITE, 6379, servers.redis)
    outside.serve(SITE, 6380, authority.over_tls(servers.redis))
    assert await inside.run(f"python3 -c '{PING}'") == "b'+PONG\\r\\n'\n"
    await inside.need("redis-cli")
    assert await inside.run("redis-cli -h cache.example PING") == "PONG\n"
    tls = "--tls --cacert /tmp/ca.pem --sni cache.example"
    assert await inside.run(f"redis-cli -h cache.example -p 6380 {tls} PING") == "PONG\n"


async def test_programs_that_follow_proxy_variables_use_the_proxy(
    inside: Inside, outside: World, authority: servers.Authority, tmp_path: Path
) -> None:
    """By CONNECT for TLS and with absolute targets for plain HTTP; a refusal is told with its reason."""
    await inside.need("pip", "git", "curl", "npm", "apt-get")
    sites = {
        "python.example": servers.python_index(),
        "npm.example": servers.npm_registry("https://npm.example"),
        "git.example": servers.git_over_http(servers.git_repository(tmp_path)),
    }
    outside.serve(SITE, 443, authority.by_name(sites))
    outside.serve(SITE, 80, servers.debian_archive(tmp_path / "archive"))

    await inside.change(attrs.evolve(ALLOWED, proxy_env=True))
    await inside.run(PIP)
    await inside.run(NPM)
    await inside.run("git clone -q https://git.example/greeter.git /tmp/g")
    await inside.run(APT.format("http://debian.example"), "root")
    shown = await inside.run("greeter; cat /tmp/g/word; cd /tmp/n && node -p 'require(\"greeter\")'")
    assert shown == "installed\n" * 3
    refused = await inside.run("curl -sS https://other.example/ 2>&1; curl -sv http://other.example/ 2>&1; true")
    assert "CONNECT tunnel failed, response 403" in refused
    assert "HTTP/1.1 403 not_allowed: other.example:80" in refused
    refused = await inside.run(f"{PIP.replace('python.example', 'other.example')} --retries 1 2>&1 || true")
    assert "403 not_allowed: other.example:443" in refused
    await inside.change(ALLOWED)
    assert "3128" not in await inside.run("env")


async def test_variables_of_the_caller_go_before_those_of_the_proxy(inside: Inside) -> None:
    """A session is created with the variables that its network brings, but for those it was given."""
    spec = SessionSpec(network=attrs.evolve(ALLOWED, proxy_env=True), env={"http_proxy": "http://own.example"})
    other = Inside(inside.supervisor, await inside.supervisor.create(spec))
    shown = (await other.run("echo $http_proxy $https_proxy $NO_PROXY")).split()
    assert shown == ["http://own.example", "http://198.18.0.1:3128", "localhost,127.0.0.1,198.18.0.1"]
