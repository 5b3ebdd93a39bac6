"""Attacks on secrets: at the traces that a value leaves, and at the process that has it, by way of the one before it.

The second attack takes the place of the egress process: it starts a broker of its own and hands it connections, whose
client and whose server it is itself. What its server got and what its client was told are the truth.

Sources: proc_pid_mem(5), proc_pid_environ(5), proc_pid_cgroup(5); RFC 6066, 3.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import attrs
import trio

from egress import brokering as b
from egress.protocol import SecretUse
from sandkasten.errors import SandkastenError, SecretsOff
from sandkasten.links.processes import STOP_S, start_egress_as_child
from sandkasten.model.network import Network, NetworkMode, NewSecret
from sandkasten.security.attacks.field import Field, secret
from sandkasten.security.probes.attempt import Answers, NotApplicable, attempt, collect

_NAME, _HOST, _OTHER = "attacked", "secret.example", "other.example"
_PLACEHOLDER, _FOREIGN = "placeholder-of-this-session", "placeholder-of-another-session"
_NOTHING = "nothing"
_CERTIFY = """
import json, os, sys
sys.path.append(sys.argv[1])
from egress.authority import Authority, new_authority
file = os.memfd_create("certificates")
authority, made = Authority(new_authority(), file), {}
for host in sys.argv[2:]:
    authority.context_for(host)  # writes key and certificate
    made[host] = os.pread(file, 1 << 20, 0).decode()
print(json.dumps([authority.certificate, made]))
"""
"""Program that makes an authority, with keys and certificates of hosts; in a process of its own, as all of `egress`."""
_MOST_OF_A_MAPPING = _MOST_OF_A_FILE = 64 * 1024**2
_LOOK = """
import os
print(os.environ["TOKEN"])
for each in os.listdir("/proc"):
    try:
        print(open(f"/proc/{each}/environ").read(), open(f"/proc/{each}/cmdline").read())
    except OSError:
        pass
"""


# Traces -------------------------------------------------------------------------------------------------------------


class _Logged(logging.Handler):
    """A log handler that keeps the text of every record."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += repr(vars(record))


@contextmanager
def _listening() -> Iterator[_Logged]:
    lines, root = _Logged(), logging.getLogger()
    root.addHandler(lines)
    try:
        yield lines
    finally:
        root.removeHandler(lines)


def _processes_of(session_id: str) -> list[Path]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if session_id in (place / "cgroup").read_text():
                found.append(place)
    return found


def _memory_of(place: Path) -> Iterator[bytes]:
    """Yield the readable memory of a process, mapping by mapping. Environment and arguments are part of it."""
    with open(place / "mem", "rb", buffering=0) as memory:
        for line in (place / "maps").read_text().splitlines():
            span, rights, *_ = line.split()
            low, high = (int(each, 16) for each in span.split("-"))
            if rights.startswith("r") and high - low <= _MOST_OF_A_MAPPING:
                with suppress(OSError, ValueError):  # a mapping of the kernel's, or gone meanwhile
                    memory.seek(low)
                    yield memory.read(high - low)


def _is_in_memory(session_id: str, text: bytes) -> bool:
    found = False
    for place in _processes_of(session_id):
        with suppress(OSError):
            found |= any(text in each for each in _memory_of(place))
    return found


def _is_in_files(data_dir: Path, text: bytes) -> bool:
    """Look into what the daemon has written; the broker's own directory apart."""
    files = [Path(above, name) for above, _, names in os.walk(data_dir) for name in names]
    return any(_has(each, text) for each in files if each.parent != data_dir / "broker")


def _has(path: Path, text: bytes) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= _MOST_OF_A_FILE and text in path.read_bytes()
    except FileNotFoundError:  # what other attacks left in the trash is deleted meanwhile
        return False


def _told(found: bool) -> str:
    return "the value" if found else _NOTHING


@attempt("secrets.traces", "find the value of a secret wherever it was named or used", "CWE-200", (_NOTHING,))
async def find_traces(field: Field) -> Answers:
    """Processes of the session, searched from outside, and what the daemon has written; the broker's own file apart."""
    if os.geteuid() != 0:
        raise NotApplicable("this attack reads the memory of a session's processes, as root")
    value = secret()
    network = Network(NetworkMode.ALLOW, allow=[_HOST], secrets=[_NAME])
    with _listening() as lines:
        try:
            await field.supervisor.put_secret(NewSecret(_NAME, value, [_HOST]))
        except SecretsOff as error:
            raise NotApplicable(str(error)) from None
        try:
            async with (
                field.session(network=network, secret_env={"TOKEN": _NAME}) as session_id,
                trio.open_nursery() as nursery,
            ):
                seen = await field.python(session_id, _LOOK)
                placeholder = seen.stdout.split(b"\n")[0]
                nursery.start_soon(field.run, session_id, "env; sleep 60")
                with trio.move_on_after(10 * field.patience) as patience:
                    while not await trio.to_thread.run_sync(_is_in_memory, session_id, placeholder):  # noqa: ASYNC110
                        await trio.sleep(0.1)
                if patience.cancelled_caught or not placeholder:
                    raise RuntimeError("a search that does not find the placeholder finds no value, either")
                in_memory = await trio.to_thread.run_sync(_is_in_memory, session_id, value.encode())
                log = await field.supervisor.egress_log(session_id)
                happened = []
                async with field.supervisor.events(session_id=session_id, after="0") as events:
                    with trio.move_on_after(1):
                        async for event in events:
                            happened.append(event)
                nursery.cancel_scope.cancel()
        finally:
            with trio.move_on_after(10 * field.patience, shield=True), suppress(SandkastenError):
                await field.supervisor.delete_secret(_NAME)
    is_written = await trio.to_thread.run_sync(_is_in_files, field.config.data_dir, value.encode())
    return {
        "the session's environment": _told(value.encode() in seen.output),
        "memory of the session": _told(in_memory),
        "log of the way out": _told(value in repr(log)),
        "events": _told(value in repr(happened)),
        "log": _told(value in lines.text),
        "database and records": _told(is_written),
    }


# The broker ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Seen:
    """Bytes that came to the server, and bytes that the client was told."""

    server: bytes
    client: bytes

    def judged(self, value: bytes) -> str:
        """Return an answer about the way out and back."""
        if value in self.server:
            return "the server has the value"
        if value in self.client:
            return "the client has the value"
        if self.client.startswith(b"HTTP/1.1 4") and not self.server:
            return "refused"
        return "the placeholder" if b"placeholder-of-" in self.server else "cut"


class _FalseEgress:
    """An egress process in the hands of an attacker, as a broker sees it. Blocking."""

    def __init__(self, channel: socket.socket, directory: Path, patience_s: float) -> None:
        self._channel, self._directory, self._patience_s = channel, directory, patience_s

    def carry(
        self, head: str, *, host: str = _HOST, port: int = 443, hosts: Iterable[str] = (_HOST,), echoes: bool = False
    ) -> _Seen:
        """Hand a connection over, whose client sends a request, and whose server answers."""
        uses = (SecretUse(_NAME, _PLACEHOLDER, tuple(hosts)),)
        (client, client_end), (server, server_end) = socket.socketpair(), socket.socketpair()
        seen = {"server": b"", "client": b""}

        def serve() -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._directory / host)
            with suppress(OSError), context.wrap_socket(server, server_side=True) as tls:
                seen["server"] = _read_head(tls)
                body = seen["server"] if echoes else b"ok"
                tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
                _read_all(tls)

        def ask() -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # whose certificate is another matter
            with suppress(OSError), context.wrap_socket(client, server_hostname=host) as tls:
                tls.sendall(head.encode())
                seen["client"] = _read_all(tls)

        with client, server:
            for each in (client, server):
                each.settimeout(self._patience_s)
            with client_end, server_end:
                order = b.encode(b.Carry(1, "attacker", host, port, uses))
                socket.send_fds(self._channel, [order], [client_end.fileno(), server_end.fileno()])
            threads = [threading.Thread(target=work) for work in (serve, ask)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return _Seen(**seen)


def _read_head(tls: ssl.SSLSocket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data and (more := tls.recv(65536)):
        data += more
    return data


def _read_all(tls: ssl.SSLSocket) -> bytes:
    data = b""
    with suppress(OSError):
        while more := tls.recv(65536):
            data += more
    return data


@asynccontextmanager
async def _false_egress(value: str, patience_s: float) -> AsyncIterator[_FalseEgress]:
    """Start a broker that has a value, and be its egress process."""
    if os.geteuid() != 0:
        raise NotApplicable("this attack starts a process as root, as the daemon's launcher does")
    if importlib.util.find_spec("cryptography") is None:
        raise NotApplicable("the extra `secrets` is not installed")
    with tempfile.TemporaryDirectory(prefix="sandkasten-attack-") as directory:
        ca_file = await trio.to_thread.run_sync(_certify, Path(directory))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(patience_s)
        try:
            broker = await start_egress_as_child("broker", None, f"data={directory}", f"ca={ca_file}")
            try:
                broker.sock.settimeout(patience_s)
                await trio.to_thread.run_sync(_order, broker.sock, b.PutSecret(1, _NAME, value, (_HOST,)))
                await trio.to_thread.run_sync(_order, broker.sock, b.JoinEgress(2), theirs.fileno())
                yield _FalseEgress(ours, Path(directory), patience_s)
            finally:
                with trio.CancelScope(shield=True):
                    await broker.end("broker", STOP_S)
        finally:
            ours.close()
            theirs.close()


def _certify(directory: Path) -> Path:
    """Make files with keys and certificates of the hosts of the attack; return that of their authority."""
    hosts = (_HOST, _OTHER, f"a.{_HOST}")
    command = [sys.executable, "-I", "-B", "-c", _CERTIFY, str(Path(b.__file__).parents[1]), *hosts]
    certificate, made = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    for name, text in {"authority": certificate, **made}.items():
        (directory / name).write_text(text)
    return directory / "authority"


def _order(sock: socket.socket, request: b.BrokerRequest, *fds: int) -> None:
    socket.send_fds(sock, [b.encode(request)], fds)
    answer = b.decode_broker_answer(sock.recv(b.MAX_DATAGRAM_BYTES))
    if not isinstance(answer, b.BrokerDone):
        raise RuntimeError(f"the broker of the attack refuses: {answer}")


@attempt("secrets.broker", "get a value by the process that hands connections to the broker, taken over", "CWE-441",
         ("the placeholder", "refused", "cut"), users=("",))  # fmt: skip
async def deceive_broker(field: Field) -> Answers:
    """Another host under the name of the secret's, another port, another Host, another session's placeholder, and an
    answer with the value. The one way that is meant to work must work, or the others prove nothing."""
    value = secret()

    def head(host: str = _HOST, placeholder: str = _PLACEHOLDER, target: str = "/") -> str:
        return f"GET {target} HTTP/1.1\r\nHost: {host}\r\nX-Key: {placeholder}\r\n\r\n"

    def attack(egress: _FalseEgress) -> Answers:
        if value.encode() not in egress.carry(head()).server:
            raise RuntimeError("the broker of the attack fills in no value")
        seen = {
            "another host": egress.carry(head(_OTHER), host=_OTHER, hosts=(_OTHER,)),
            "a host below": egress.carry(head(f"a.{_HOST}"), host=f"a.{_HOST}", hosts=(f"*.{_HOST}",)),
            "another port": egress.carry(head(f"{_HOST}:8443"), port=8443, hosts=(f"{_HOST}:8443",)),
            "another Host": egress.carry(head(_OTHER)),
            "another session's": egress.carry(head(placeholder=_FOREIGN)),
            "in the target": egress.carry(head(placeholder=_FOREIGN, target=f"/{_PLACEHOLDER}")),
            "an echo": egress.carry(head(), echoes=True),
        }
        echo = seen.pop("an echo")
        is_cut = value.encode() in echo.server and value.encode() not in echo.client
        answers = {name: each.judged(value.encode()) for name, each in seen.items()}
        return {**answers, "an echo": "cut" if is_cut else "the client has the value"}

    async with _false_egress(value, 10 * field.patience) as egress:
        return await trio.to_thread.run_sync(attack, egress)


SECRETS = collect(globals())
