"""Secrets of a session, from the API of the tree to a server outside: what a program uses, and what nobody finds."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from egress.protocol import BROKER_ID
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import StopOrder, open_tree
from sandkasten.config import Config, EgressSettings
from sandkasten.config.seccomp import load_filters
from sandkasten.errors import InvalidRequest, SecretNotFound
from sandkasten.host import examine
from sandkasten.links.processes import start_as_child
from sandkasten.model import ExecResult, ExecSpec, Session, SessionPatch, SessionSpec
from sandkasten.model.network import TRUST_FILE, Network, NetworkMode, NewSecret
from tests.egress.broker_world import foreign_authority
from tests.kernel.world import Handler, World, world
from tests.waiting import patience, until

SITE, OTHER = "93.184.215.14", "93.184.215.15"
VALUE = "sk-live-5d0c2b7e91a84f36"
NETWORK = Network(NetworkMode.ALLOW, allow=["api.example", "other.example"], secrets=["key"])
SPEC = SessionSpec(network=NETWORK, secret_env={"TOKEN": "key"})


@attrs.define
class Outside:
    """The world, with the heads of the requests that its two hosts got."""

    world: World
    ca_file: Path
    heads: dict[str, list[bytes]] = attrs.field(factory=lambda: {"api.example": [], "other.example": []})

    def api(self, host: str, context: ssl.SSLContext) -> Handler:
        """Return a server of one host, which sends those who ask for `/away` to the other."""

        def handle(connection: socket.socket) -> None:
            # Fails if the connection is reset, as `wrap_socket` does, which leaves it open then.
            connection.recv(1, socket.MSG_PEEK)
            with context.wrap_socket(connection, True, do_handshake_on_connect=False) as tls:
                tls.do_handshake()
                head = b""
                while b"\r\n\r\n" not in head:
                    if not (data := tls.recv(65536)):
                        return
                    head += data
                self.heads[host].append(head)
                if b" /away " in head:
                    tls.sendall(b"HTTP/1.1 302 F\r\nLocation: https://other.example/\r\nContent-Length: 0\r\n\r\n")
                elif b" /echo " in head:
                    tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(head), head))
                else:
                    tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

        return handle


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    with foreign_authority() as (authority, ca_file), world(tmp_path, f"{SITE}/32", f"{OTHER}/32") as made:
        made.name({"api.example": SITE, "other.example": OTHER})
        found = Outside(made, ca_file)
        for host, address in (("api.example", SITE), ("other.example", OTHER)):
            made.serve(address, 443, found.api(host, authority.context_for(host)))
        yield found


@asynccontextmanager
async def served(config: Config, outside: Outside, *, ends_sessions: bool = True) -> AsyncIterator[LocalSupervisor]:
    """A tree whose egress process is in the world, and whose broker knows the world's authority."""
    egress = EgressSettings(permit=(f"{SITE}/32", f"{OTHER}/32"), ca_file=outside.ca_file)
    config = attrs.evolve(config, egress=egress)
    machine = await trio.to_thread.run_sync(partial(examine.examine, config.data_dir, config=config))
    start, order = outside.world.start_egress, StopOrder(ends_sessions=ends_sessions)
    profiles = load_filters(config.security)
    async with open_tree(config, machine, profiles, start_as_child, order, start_egress=start) as supervisor:
        yield supervisor


@pytest.fixture
async def supervisor(config: Config, outside: Outside) -> AsyncIterator[LocalSupervisor]:
    async with served(config, outside) as opened:
        await opened.put_secret(NewSecret("key", VALUE, ["api.example"]))
        yield opened


async def python(supervisor: LocalSupervisor, session: Session, code: str) -> ExecResult:
    """Run a program inside, with what it needs for a request imported."""
    program = f"import os, socket, ssl, urllib.request\n{ASK}\n{code}"
    with trio.fail_after(patience(60)):
        return await supervisor.exec(session.id, ExecSpec(argv=("python3", "-c", program)))


ASK = """
def ask(url):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {os.environ['TOKEN']}"})
    return urllib.request.urlopen(request, timeout=20).read().decode()
"""


async def test_a_program_uses_a_value_that_it_never_has(supervisor: LocalSupervisor, outside: Outside) -> None:
    """urllib trusts the broker by the environment alone; the server gets the value, the program has another text."""
    session = await supervisor.create(SPEC)
    result = await python(supervisor, session, "print(ask('https://api.example/'), os.environ['TOKEN'])")
    assert result.stdout.startswith(b"ok "), result.stderr
    (head,) = outside.heads["api.example"]
    assert f"Authorization: Bearer {VALUE}".encode() in head
    assert VALUE.encode() not in result.stdout
    assert len(result.stdout.split()[1]) == 40
    counters = (await supervisor.network(session.id)).counters
    assert counters.connections == 1
    assert min(counters.bytes_up, counters.bytes_down) > 500, "TLS with the server and with the client"


async def test_a_redirect_elsewhere_takes_the_placeholder_along(supervisor: LocalSupervisor, outside: Outside) -> None:
    """Another allowed host, which the program was sent to, gets what the program has."""
    session = await supervisor.create(SPEC)
    trusting = "ssl._create_default_https_context = ssl._create_unverified_context\n"  # the other host's is foreign
    result = await python(supervisor, session, f"{trusting}print(ask('https://api.example/away'))")
    assert result.stdout == b"ok\n", result.stderr
    (head,) = outside.heads["other.example"]
    assert b"Authorization: Bearer " in head
    assert VALUE.encode() not in head


async def test_an_echo_reaches_no_program(supervisor: LocalSupervisor, outside: Outside) -> None:
    """The connection ends before the value is whole, and the run says why."""
    session = await supervisor.create(SPEC)
    result = await python(supervisor, session, "print(ask('https://api.example/echo'))")
    assert result.end.exit_code != 0
    assert VALUE[:4].encode() not in result.stdout + result.stderr

    async def is_logged() -> bool:
        page = await supervisor.egress_log(session.id, host="api.example")
        return any(entry.reason == "echo" for entry in page.entries)

    await until(is_logged)


async def test_a_server_with_another_certificate_hears_nothing(
    config: Config, outside: Outside, tmp_path: Path
) -> None:
    """Without the authority that root has named, the host is not who it says."""
    async with served(config, attrs.evolve(outside, ca_file=_of_nobody(tmp_path))) as supervisor:
        await supervisor.put_secret(NewSecret("key", VALUE, ["api.example"]))
        session = await supervisor.create(SPEC)
        result = await python(supervisor, session, "print(ask('https://api.example/'))")
        assert result.end.exit_code != 0

        async def is_logged() -> bool:
            page = await supervisor.egress_log(session.id, host="api.example")
            return any(entry.reason == "certificate" for entry in page.entries)

        await until(is_logged)
    assert outside.heads["api.example"] == []


def _of_nobody(directory: Path) -> Path:
    with foreign_authority() as (authority, _):
        file = directory / "nobody.pem"
        file.write_text(authority.certificate)
    return file


async def test_a_change_gives_a_live_session_a_secret_and_takes_it(
    supervisor: LocalSupervisor, outside: Outside
) -> None:
    """With the patch come placeholder, authority and way; without the secret the placeholder goes out as it is."""
    session = await supervisor.create(SessionSpec())
    await supervisor.update(session.id, SessionPatch(network=NETWORK, secret_env={"TOKEN": "key"}))
    result = await python(supervisor, session, "print(ask('https://api.example/'))")
    assert result.stdout == b"ok\n", result.stderr
    await supervisor.update(session.id, SessionPatch(network=attrs.evolve(NETWORK, secrets=())))
    trusting = "ssl._create_default_https_context = ssl._create_unverified_context\n"
    result = await python(supervisor, session, f"{trusting}print(ask('https://api.example/'))")
    assert result.stdout == b"ok\n", result.stderr
    first, second = outside.heads["api.example"]
    assert VALUE.encode() in first
    assert VALUE.encode() not in second


@pytest.mark.parametrize("readonly", [False, True])
async def test_the_image_trusts_the_authority(supervisor: LocalSupervisor, readonly: bool) -> None:
    """In the file of the environment, and in the image's bundle unless the root is read-only."""
    session = await supervisor.create(attrs.evolve(SPEC, readonly_rootfs=readonly))
    code = f"""
bundles = [open({TRUST_FILE!r}).read()]
for name in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"):
    if os.path.exists(name):
        bundles.append(open(name).read())
own = bundles[0].rstrip().rsplit("-----BEGIN", 1)[1]
print([own in bundle for bundle in bundles], os.environ["SSL_CERT_FILE"], len(bundles[0]) > 3000)
"""
    result = await python(supervisor, session, code)
    said = result.stdout.decode()
    assert TRUST_FILE in said, result.stderr
    assert said.startswith("[True, False]" if readonly and said.count("e, ") else "[True"), said
    assert not readonly or "[True, True]" not in said


async def test_a_secret_that_is_not_there_makes_no_session(supervisor: LocalSupervisor) -> None:
    """Neither an unknown name nor a variable with a secret that the network does not name."""
    with pytest.raises(SecretNotFound):
        await supervisor.create(attrs.evolve(SPEC, network=attrs.evolve(NETWORK, secrets=["key", "other"])))
    with pytest.raises(InvalidRequest):
        await supervisor.create(attrs.evolve(SPEC, secret_env={"TOKEN": "other"}))
    session = await supervisor.create(SessionSpec())
    with pytest.raises(SecretNotFound):
        await supervisor.update(session.id, SessionPatch(network=attrs.evolve(NETWORK, secrets=["other"])))


async def test_the_next_broker_has_the_values(supervisor: LocalSupervisor, outside: Outside, config: Config) -> None:
    """Values are in files of the broker's user alone; after a broker's end a session's connections work again."""
    session = await supervisor.create(SPEC)
    directory = config.data_dir / "broker"
    for path in (directory, *directory.iterdir()):
        status = path.stat()
        assert (status.st_uid, status.st_gid) == (BROKER_ID, BROKER_ID)
        assert stat.S_IMODE(status.st_mode) == (0o700 if path == directory else 0o600)
    before = outside.world.pids["broker"]
    os.kill(before, signal.SIGKILL)

    async def works() -> bool:
        return (await python(supervisor, session, "print(ask('https://api.example/'))")).stdout == b"ok\n"

    await until(works)
    assert outside.world.pids["broker"] != before
    assert VALUE.encode() in outside.heads["api.example"][-1]


HOLD = """
import socket, ssl
tcp = socket.create_connection(("api.example", 443))
with ssl.create_default_context().wrap_socket(tcp, server_hostname="api.example") as tls:
    print("open", flush=True)
    try:
        tls.recv(1)
    except OSError:
        pass
    print("ended")
"""


async def _held(supervisor: LocalSupervisor, session: Session) -> bytes:
    return (await supervisor.exec(session.id, ExecSpec(argv=("cat", "/workspace/held")))).stdout


async def test_the_next_daemon_goes_on_with_a_secret(config: Config, outside: Outside) -> None:
    """With the same egress process and another broker, which the process is brought together with. A connection that
    the first broker had opened breaks with it."""
    async with served(config, outside, ends_sessions=False) as first:
        await first.put_secret(NewSecret("key", VALUE, ["api.example"]))
        session = await first.create(SPEC)
        assert (await python(first, session, "print(ask('https://api.example/'))")).stdout == b"ok\n"
        await first.exec(session.id, ExecSpec(f"cat >hold.py <<'END'{HOLD}END\npython3 hold.py >held 2>&1 &"))

        async def is_held() -> bool:
            return await _held(first, session) == b"open\n"

        await until(is_held)
    before = dict(outside.world.pids)
    async with served(config, outside) as second:

        async def works() -> bool:
            return (await python(second, session, "print(ask('https://api.example/'))")).stdout == b"ok\n"

        await until(works)
        assert await _held(second, session) == b"open\nended\n"
    assert outside.world.pids["egress"] == before["egress"]
    assert outside.world.pids["broker"] != before["broker"]
    assert all(VALUE.encode() in head for head in outside.heads["api.example"])


async def test_a_deleted_secret_is_used_no_more(supervisor: LocalSupervisor, outside: Outside) -> None:
    """The placeholder goes out then as it is, and the secret is unknown."""
    session = await supervisor.create(SPEC)
    await supervisor.delete_secret("key")
    with pytest.raises(SecretNotFound):
        await supervisor.delete_secret("key")
    assert await supervisor.secrets() == ()
    result = await python(supervisor, session, "print(ask('https://api.example/'))")
    assert result.stdout == b"ok\n", result.stderr
    assert VALUE.encode() not in outside.heads["api.example"][0]
