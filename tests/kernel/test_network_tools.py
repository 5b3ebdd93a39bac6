"""Programs that people use a network with, inside a session with the defaults and without settings of a proxy: package
managers, git, curl, node, clients of databases, each against a server of the test's own."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from sandkasten.config import Config
from sandkasten.model import ExecSpec, SessionSpec
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
PROXY = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://198.18.0.1:3128")

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

Run = Callable[..., Awaitable[str]]


@pytest.fixture
def authority(tmp_path: Path) -> servers.Authority:
    return servers.Authority(tmp_path, *NAMES)


@pytest.fixture
def outside(tmp_path: Path, authority: servers.Authority) -> Iterator[World]:
    with world(tmp_path, f"{SITE}/32") as made:
        made.name(dict.fromkeys(NAMES, SITE))
        yield made


@pytest.fixture
async def run(config: Config, outside: World, authority: servers.Authority) -> AsyncIterator[Run]:
    """A function that runs a script in a session, and returns what it prints, once it succeeds."""
    async with served(config, outside) as supervisor:
        session = await supervisor.create(SessionSpec(network=ALLOWED))

        async def run(script: str, user: str | None = None, env: dict[str, str] | None = None) -> str:
            spec = ExecSpec(script, stateless=True, user=user, env={**ENV, **(env or {})})
            with trio.fail_after(patience(90)):
                result = await supervisor.exec(session.id, spec)
            log = await supervisor.egress_log(session.id)
            assert result.end.exit_code == 0, (result.output.decode(), log)
            return result.output.decode()

        await run(f"echo {shlex.quote(authority.certificate)} > /tmp/ca.pem; umask 022")
        yield run


async def need(run: Run, *programs: str) -> None:
    """Skip the test if the machine's `/usr`, which the session sees, lacks one of these."""
    for each in programs:
        if "none" in await run(f"command -v {each} || echo none"):
            pytest.skip(f"needs {each} in the machine's /usr")


async def test_pip_installs_from_an_index(run: Run, outside: World, authority: servers.Authority) -> None:
    """Over TLS, told of the certificate alone."""
    await need(run, "pip")
    outside.serve(SITE, 443, authority.over_tls(servers.python_index()))
    await run(PIP)
    assert await run("PYTHONPATH=/tmp/p python3 -c 'import greeter; print(greeter.WORD)'") == "installed\n"


async def test_npm_installs_from_a_registry(run: Run, outside: World, authority: servers.Authority) -> None:
    """Over TLS, told of the certificate alone."""
    await need(run, "npm")
    outside.serve(SITE, 443, authority.over_tls(servers.npm_registry("https://npm.example")))
    await run(NPM)
    assert await run("cd /tmp/n && node -p 'require(\"greeter\")'") == "installed\n"


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_apt_installs_from_an_archive(
    run: Run, outside: World, authority: servers.Authority, tmp_path: Path, scheme: str
) -> None:
    """As the session's root, by its user of its own that downloads."""
    await need(run, "apt-get")
    archive = servers.debian_archive(tmp_path)
    outside.serve(SITE, 80 if scheme == "http" else 443, archive if scheme == "http" else authority.over_tls(archive))
    await run(APT.format(f"{scheme}://debian.example"), user="root")
    assert await run("greeter") == "installed\n"


async def test_git_clones_and_pushes_over_https(
    run: Run, outside: World, authority: servers.Authority, tmp_path: Path
) -> None:
    """By the protocol of git's own server."""
    await need(run, "git")
    outside.serve(SITE, 443, authority.over_tls(servers.git_over_http(servers.git_repository(tmp_path))))
    await run("git clone -q https://git.example/greeter.git /tmp/g")
    assert await run("cat /tmp/g/word") == "installed\n"
    await run("cd /tmp/g && git -c user.name=a -c user.email=b commit -q --allow-empty -m x && git push -q")
    assert (await run("git ls-remote https://git.example/greeter.git main")).split()[0] == (
        await run("cd /tmp/g && git rev-parse HEAD")
    ).strip()


async def test_git_clones_over_ssh(run: Run, outside: World, tmp_path: Path) -> None:
    """Client and server both speak first, and the server is who the client knows."""
    await need(run, "git", "ssh")
    server, key, known = servers.ssh_server(tmp_path)
    outside.serve(SITE, 22, server)
    root = servers.git_repository(tmp_path)
    await run(
        f"mkdir -m 700 -p ~/.ssh && echo {shlex.quote(key)} > ~/.ssh/id_ed25519 && chmod 600 ~/.ssh/id_ed25519\n"
        f"echo {shlex.quote(known)} > ~/.ssh/known_hosts"
    )
    await run(f"git clone -q ssh://root@git.example{root}/greeter.git /tmp/g")
    assert await run("cat /tmp/g/word") == "installed\n"


async def test_git_clones_over_its_own_protocol(run: Run, outside: World, tmp_path: Path) -> None:
    """A protocol in plain text that is no HTTP."""
    await need(run, "git")
    outside.serve(SITE, 9418, servers.git_daemon(servers.git_repository(tmp_path)))
    await run("git clone -q git://git.example/greeter.git /tmp/g")
    assert await run("cat /tmp/g/word") == "installed\n"


async def test_curl_and_node_fetch(run: Run, outside: World, authority: servers.Authority) -> None:
    """Over plain HTTP and over TLS."""
    await need(run, "curl", "node")
    outside.serve(SITE, 80, http(b"plain"))
    outside.serve(SITE, 443, authority.over_tls(http(b"secret")))
    assert await run("curl -sS http://site.example/") == "plain"
    assert await run("curl -sS https://site.example/") == "secret"
    assert await run(f'node -e "{FETCH}"') == "secret\n"


async def test_psql_asks_for_tls_in_its_own_way(run: Run, outside: World, authority: servers.Authority) -> None:
    """TLS comes after the first bytes of the connection, and the client checks the name itself."""
    await need(run, "psql")
    outside.serve(SITE, 5432, servers.postgres(authority))
    where = "host=database.example user=u dbname=d sslmode=verify-full sslrootcert=/tmp/ca.pem"
    assert await run(f"psql '{where}' -Atc 'select word'") == "installed\n"


async def test_redis_is_asked_by_both_kinds_of_command(run: Run, outside: World, authority: servers.Authority) -> None:
    """An array of words or a line, and over TLS that names the server."""
    outside.serve(SITE, 6379, servers.redis)
    outside.serve(SITE, 6380, authority.over_tls(servers.redis))
    assert await run(f"python3 -c '{PING}'") == "b'+PONG\\r\\n'\n"
    await need(run, "redis-cli")
    assert await run("redis-cli -h cache.example PING") == "PONG\n"
    tls = "--tls --cacert /tmp/ca.pem --sni cache.example"
    assert await run(f"redis-cli -h cache.example -p 6380 {tls} PING") == "PONG\n"


async def test_programs_that_follow_proxy_variables_use_the_proxy(
    run: Run, outside: World, authority: servers.Authority, tmp_path: Path
) -> None:
    """By CONNECT for TLS and with absolute targets for plain HTTP; a refusal is told with its reason."""
    await need(run, "pip", "git", "curl", "npm", "apt-get")
    sites = {
        "python.example": servers.python_index(),
        "npm.example": servers.npm_registry("https://npm.example"),
        "git.example": servers.git_over_http(servers.git_repository(tmp_path)),
    }
    outside.serve(SITE, 443, authority.by_name(sites))
    outside.serve(SITE, 80, servers.debian_archive(tmp_path / "archive"))

    async def proxied(script: str, user: str | None = None) -> str:
        return await run(script, user, PROXY)

    await proxied(PIP)
    await proxied(NPM)
    await proxied("git clone -q https://git.example/greeter.git /tmp/g")
    await proxied(APT.format("http://debian.example"), "root")
    assert await run("greeter; cat /tmp/g/word /tmp/n/node_modules/greeter/package.json") > "installed\ninstalled\n{"
    refused = await proxied("curl -sS https://other.example/ 2>&1; curl -sv http://other.example/ 2>&1; true")
    assert "CONNECT tunnel failed, response 403" in refused
    assert "HTTP/1.1 403 not_allowed: other.example:80" in refused
    refused = await proxied(f"{PIP.replace('python.example', 'other.example')} --retries 1 2>&1 || true")
    assert "403 not_allowed: other.example:443" in refused
