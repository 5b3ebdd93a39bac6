"""Ways out of sessions: what one costs to make, and what it carries beside a veth pair with NAT, and with
the broker of secrets beside a plain tunnel; and the ways in, a preview and a published port, beside connections made in
the session's own network.

`python -m bench.ways_out` is a node of its own in new network and mount namespaces, all of which end with it: the
daemon and its egress process run there, and one veth pair leads from it to the world, where the server is. A second
namespace behind the node stands for a session with a veth pair; the node masquerades it (nftables). A session in the
mode `bridge` is a third way. All of them cross one veth pair to the world, and are measured in turn, by one program.
Needs `ip`, and `nft` for the second way.

Sources: veth(4), network_namespaces(7), nft(8).
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio

from bench import daemon
from bench.sampling import Table, blocks
from bench.thousand import carrier_of
from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.sandbox import network

PROXY, NAT, BRIDGE = "way out", "veth + NAT", "mode bridge"
MAKING = "the three descriptors of a way out"
CREATE_NONE, CREATE_ALLOW = "create, network none", "create, network allow"
PATCH = "a way out for a session that runs, PATCH"
PREVIEW, DIRECT = "a request over a preview", "the same request, in the session's network"
FRESH = "the same request, in the session's network, over a new connection"
TUNNEL, BROKER = "a tunnel", "the broker"
PUBLISHED, DIRECT_PORT = "a published port, MB/s", "the same port, in the session's network, MB/s"
MIB = 1024 * 1024
_PORT, _NAME = 9000, "world.example"
_TLS_PORT, _TLS_NAMES = 9443, {TUNNEL: "plain.example", BROKER: "secret.example"}
_WORLD, _NODE = "203.0.113.2", "203.0.113.1"
_INNER, _INNER_NODE = "203.0.113.6", "203.0.113.5"
_SETTLE_S = 0.03
_GOES_ON = 50
_OTHERWISE, _ALL_WAYS_SHARE = {"SANDKASTEN_EGRESS_ALWAYS_DENY": "nobody.example"}, 0.5
_MASQUERADE = "table ip bench { chain out { type nat hook postrouting priority 100; oifname world masquerade; }; }"

_SERVER = f"""
import os, socket, sys
server = socket.create_server(("{_WORLD}", {_PORT}), backlog=512)
print("ready", flush=True)
block = bytes(262144)
while True:
    client, _ = server.accept()
    if os.fork():
        client.close()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        continue
    asked = client.recv(16)[1:]
    if asked[:1] == b"d":
        left = int(asked[1:])
        while left:
            left -= client.send(block[:left])
    elif asked[:1] == b"u":
        client.sendall(b"x")
        while client.recv_into(bytearray(262144)):
            pass
        client.sendall(b"x")
    else:
        client.sendall(b"x")
    os._exit(0)
"""
_CLIENT = """
import json, socket, sys, time
host, port, connects, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
host, block, found = socket.gethostbyname(host), bytes(262144), {"connects_ms": []}
for _ in range(connects):
    began = time.perf_counter()
    with socket.create_connection((host, port)) as client:
        client.sendall(b"\\0c")
        assert client.recv(1) == b"x"
    found["connects_ms"].append((time.perf_counter() - began) * 1000)
with socket.create_connection((host, port)) as client:
    began, left, room = time.perf_counter(), size, bytearray(262144)
    client.sendall(b"\\0d%d" % size)
    while got := client.recv_into(room):
        left -= got
    assert left == 0
    found["down"] = size / (time.perf_counter() - began) / 1e6
with socket.create_connection((host, port)) as client:
    client.sendall(b"\\0u")
    assert client.recv(1) == b"x"
    began, left = time.perf_counter(), size
    while left:
        left -= client.send(block[:left])
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b"x"
    found["up"] = size / (time.perf_counter() - began) / 1e6
print(json.dumps(found))
"""


_WEB_PORT = 8000
_WEB_SERVER = f"""
import socket, threading
def serve(client):
    data = b""
    while got := client.recv(65536):
        data += got
        if data.endswith(b"\\r\\n\\r\\n"):
            client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
            data = b""
    client.close()
server = socket.create_server(("127.0.0.1", {_WEB_PORT}), backlog=512)
while True:
    client, _ = server.accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=serve, args=(client,)).start()
"""


_TLS_SERVER = f"""
import os, socket, ssl, sys, threading
from egress.authority import Authority, new_authority
authority = Authority(new_authority(), os.memfd_create("certificates"))
with open(sys.argv[1], "w") as file:
    file.write(authority.certificate)
contexts = {{name: authority.context_for(name) for name in {sorted(_TLS_NAMES.values())!r}}}
first = next(iter(contexts.values()))
def choose(sock, name, _context):
    sock.context = contexts[name]
first.sni_callback = choose
def serve(plain):
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with first.wrap_socket(plain, server_side=True) as client:
        data = b""
        while got := client.recv(65536):
            data += got
            if data.endswith(b"\\r\\n\\r\\n"):
                size = int(data.split()[1][1:])
                client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % size)
                client.sendall(bytes(size))
                data = b""
server = socket.create_server(("{_WORLD}", {_TLS_PORT}), backlog=512)
print("ready", flush=True)
while True:
    client, _ = server.accept()
    threading.Thread(target=serve, args=(client,)).start()
"""
_TLS_CLIENT = """
import json, os, socket, ssl, sys, time
host, port, connects, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
context, found = ssl.create_default_context(), {"connects_ms": []}
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the tunnel's certificate is the world's
def ask(client, size):
    head = f"GET /{size} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\nAuthorization: Bearer {os.environ['KEY']}\\r\\n\\r\\n"
    client.sendall(head.encode())
    data = b""
    while b"\\r\\n\\r\\n" not in data:
        data += client.recv(65536)
    assert data.startswith(b"HTTP/1.1 200"), data
    left, room = size - len(data.partition(b"\\r\\n\\r\\n")[2]), bytearray(262144)
    while left:
        left -= client.recv_into(room)
def connected():
    plain = socket.create_connection((host, port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as clients of HTTP do
    return context.wrap_socket(plain, server_hostname=host)
for _ in range(connects):
    began = time.perf_counter()
    with connected() as client:
        ask(client, 1)
    found["connects_ms"].append((time.perf_counter() - began) * 1000)
with connected() as client:
    ask(client, 1)
    began = time.perf_counter()
    ask(client, size)
    found["down"] = size / (time.perf_counter() - began) / 1e6
print(json.dumps(found))
"""
_SENDER_PORT = 8001
_SENDER = f"""
import socket, threading
def send(client):
    with client:
        left, block = int(client.recv(16)), bytes(262144)
        while left:
            left -= client.send(block[:left])
server = socket.create_server(("127.0.0.1", {_SENDER_PORT}), backlog=16)
while True:
    threading.Thread(target=send, args=(server.accept()[0],)).start()
"""


_GOING_ON = """
import json, os, socket, ssl, sys, time
place, host, port, head, is_tls = sys.argv[1], sys.argv[2], int(sys.argv[3]), "".join(sys.argv[4:5]), len(sys.argv) > 5
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
found = {"connects": 0, "failed": 0, "longest_ms": 0.0, "held": "lives"}
def connected(asked):
    client = socket.create_connection((socket.gethostbyname(host), port), timeout=30)
    if is_tls:
        client = context.wrap_socket(client, server_hostname=host)
    client.sendall(head.encode() or asked)
    assert client.recv(12) in (b"x", b"HTTP/1.1 200")
    return client
held = connected(b"\\0u")
while True:
    began = time.perf_counter()
    try:
        connected(b"\\0c").close()
    except (OSError, AssertionError):
        found["failed"] += 1
    try:
        held.send(b"x")
    except OSError:
        found["held"] = "reset"
    found["connects"] += 1
    found["longest_ms"] = max(found["longest_ms"], (time.perf_counter() - began) * 1000)
    with open(place + ".new", "w") as file:
        json.dump(found, file)
    os.rename(place + ".new", place)
    time.sleep(0.005)
"""
"""Program in a session that looks a name up and connects, again and again, beside a connection that it keeps."""


async def measure_ways_out(table: Table, share: float, seed: int) -> dict[str, Any]:
    """Have a node of its own measure; add its rows to `table` and return its facts."""
    if shutil.which("ip") is None:
        return {"ways out": "not measured: this machine has no `ip`"}
    command = [sys.executable, "-m", "bench.ways_out", str(share), str(seed)]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace")[-800:])
    found = json.loads(done.stdout)
    for name, row in found["rows"].items():
        table.row(name).values += row["values"]
        table.row(name).errors += row["errors"]
    return dict(found["facts"])


def main() -> None:
    """Be the node, measure, and print rows and facts."""
    share, chance = float(sys.argv[1]), random.Random(int(sys.argv[2]))
    table, facts = Table(), dict[str, Any]()
    _measure_making(table, _count(100, share))
    way_out = {"mode": "allow", "allow": [f"{_NAME}:{_PORT}"]}
    with tempfile.TemporaryDirectory(prefix="sandkasten-bench-") as scratch, ExitStack() as undo:
        _become_node(Path(scratch))
        world = undo.enter_context(_namespace("world", _NODE, _WORLD))
        undo.enter_context(_serving(world))
        has_broker = importlib.util.find_spec("cryptography") is not None
        environ = {"SANDKASTEN_EGRESS_PERMIT": f"{_WORLD}/32", "SANDKASTEN_PREVIEW_LISTEN": "127.0.0.1:0"}
        environ["SANDKASTEN_PREVIEW_PUBLISH"] = "127.0.0.1"
        environ |= {"SANDKASTEN_ISOLATION_ALLOW_BRIDGE": "true", "SANDKASTEN_ISOLATION_BRIDGE_RESOLVERS": _WORLD}
        _run("ip", "route", "add", "default", "via", _WORLD)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # of this namespace (ip-sysctl.rst)
        if has_broker:
            environ["SANDKASTEN_EGRESS_CA_FILE"] = authority = str(Path(scratch, "authority.pem"))
            undo.enter_context(_serving(world, _TLS_SERVER, authority))
        pid, address = undo.enter_context(daemon.running(Path(scratch, "data"), **environ))
        client = undo.enter_context(daemon.Client(address))
        limits = {"cpu": os.cpu_count() or 1}
        session = client.call("POST", "/v1/sessions", {"network": way_out, "limits": limits})
        works: dict[str, Callable[[Sequence[str]], bytes]] = {PROXY: partial(_inside, client, session["id"])}
        if shutil.which("nft") is None:
            facts[NAT] = "not measured: this machine has no `nft`"
        else:
            inner = undo.enter_context(_namespace("inner", _INNER_NODE, _INNER))
            _run("ip", "route", "add", "default", "via", _INNER_NODE, pid=inner)
            works[NAT] = partial(_behind, inner)
            _run("nft", _MASQUERADE)
        linked = {"mode": "bridge", "allow": [f"{_WORLD}/32"]}
        bridged = client.call("POST", "/v1/sessions", {"network": linked, "limits": limits})
        works[BRIDGE] = lambda said: _inside(client, bridged["id"], [_WORLD, *said[1:]])
        _measure_carrying(table, works, share, chance)
        if has_broker:
            _measure_broker(table, facts, pid, client, share, chance)
        else:
            facts[BROKER] = "not measured: the extra `secrets` is not installed"
        _measure_preview(table, facts, pid, client, session["id"], _count(400, share), chance)
        _measure_published(table, client, session["id"], share, chance)
        for each in (session, bridged):
            client.call("DELETE", f"/v1/sessions/{each['id']}")
        _measure_creates(table, client, way_out, _count(60, share), chance)
        _measure_restarts(facts, Path(scratch, "restarts"), environ, way_out, share)
    rows = {name: {"values": row.values, "errors": row.errors} for name, row in table.rows.items()}
    print(json.dumps({"rows": rows, "facts": facts}))


def _count(full: int, share: float) -> int:
    return max(5, round(full * share))


# The places -----------------------------------------------------------------------------------------------------------


def _become_node(scratch: Path) -> None:
    """Enter network and mount namespaces of this process alone, where the world has a name, and no server of names: a
    question for another is refused at once."""
    syscalls.unshare(k.CLONE_NEWNET | k.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=k.MS_REC | k.MS_PRIVATE)
    hosts = f"127.0.0.1 localhost\n{_WORLD} {_NAME} {' '.join(_TLS_NAMES.values())}\n"
    for name, text in (("hosts", hosts), ("resolv.conf", f"nameserver {_WORLD}\n")):
        file = scratch / name
        file.write_text(text)
        file.chmod(0o644)
        syscalls.mount(str(file), f"/etc/{name}", flags=k.MS_BIND)
    network.loopback_up()


@contextmanager
def _namespace(link: str, near: str, far: str) -> Iterator[int]:
    """Make a network namespace at the other end of a veth pair; yield the pid of the process that holds it."""
    with subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 3600"], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()  # now it is in a namespace of its own
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "far", "netns", str(holder.pid))
            for name, address, pid in ((link, near, 0), ("far", far, holder.pid)):
                _run("ip", "address", "add", f"{address}/30", "dev", name, pid=pid)
                _run("ip", "link", "set", name, "up", pid=pid)
            yield holder.pid
        finally:
            holder.kill()


@contextmanager
def _serving(pid: int, program: str = _SERVER, *arguments: str) -> Iterator[None]:
    command = [*_entering(pid), sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as server:
        try:
            assert server.stdout is not None
            if server.stdout.readline() != b"ready\n":
                raise RuntimeError("the server in the world does not run")
            yield
        finally:
            server.kill()


def _entering(pid: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid else []


def _run(*command: str, pid: int = 0) -> bytes:
    """Run a program in the network namespace of a process, 0 for this one; return its output."""
    done = subprocess.run([*_entering(pid), *command], capture_output=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr.decode(errors='replace')[-300:]}")
    return done.stdout


def _inside(client: daemon.Client, session: str, arguments: Sequence[str], program: str = _CLIENT) -> bytes:
    argv = ["python3", "-c", program, *arguments]
    answer = client.call("POST", f"/v1/sessions/{session}/exec", {"argv": argv, "timeout_ms": 110_000})
    if answer["exit_code"] != 0:
        raise RuntimeError(str(answer)[-300:])
    return str(answer["output"]).encode()


def _behind(pid: int, arguments: Sequence[str]) -> bytes:
    return _run("python3", "-c", _CLIENT, *arguments, pid=pid)


# The measurements -----------------------------------------------------------------------------------------------------


def _measure_making(table: Table, count: int) -> None:
    """Make ways out as a builder does, each in a network namespace of its own."""
    back = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    for _ in range(count):
        syscalls.unshare(k.CLONE_NEWNET)
        network.loopback_up()
        here = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        fds: list[int] = []
        with table.timed(MAKING):
            fds = network.open_way_out(here)
        for fd in (*fds, here):
            os.close(fd)
        syscalls.setns(back, k.CLONE_NEWNET)
    os.close(back)


def _measure_carrying(
    table: Table, works: Mapping[str, Callable[[Sequence[str]], bytes]], share: float, chance: random.Random
) -> None:
    """Connect and carry in turn."""
    size = max(4 * MIB, round(512 * MIB * share))
    for name in blocks(list(works), max(2, round(6 * share)), chance):
        found = json.loads(works[name]([_NAME, str(_PORT), str(max(5, round(50 * share))), str(size)]))
        table.row(connect_row(name)).values += found["connects_ms"]
        for way in ("up", "down"):
            table.row(rate_row(name, way)).values.append(found[way])


def _measure_broker(
    table: Table, facts: dict[str, Any], pid: int, client: daemon.Client, share: float, chance: random.Random
) -> None:
    """Make TLS connections with a request, by a tunnel and by the broker in turn; then carry a large body. At last the
    broker is killed."""
    hosts = {name: f"{host}:{_TLS_PORT}" for name, host in _TLS_NAMES.items()}
    client.call("POST", "/v1/secrets", {"name": "bench", "value": "value-of-bench", "hosts": [hosts[BROKER]]})
    way_out = {"mode": "allow", "allow": sorted(hosts.values()), "secrets": ["bench"]}
    limits = {"cpu": os.cpu_count() or 1}
    asked = {"network": way_out, "env": {"KEY": {"secret": "bench"}}, "limits": limits}
    session = client.call("POST", "/v1/sessions", asked)["id"]
    size = max(4 * MIB, round(256 * MIB * share))
    for name in blocks(list(hosts), max(2, round(6 * share)), chance):
        arguments = [_TLS_NAMES[name], str(_TLS_PORT), str(max(5, round(50 * share))), str(size)]
        found = json.loads(_inside(client, session, arguments, _TLS_CLIENT))
        table.row(tls_row(name)).values += found["connects_ms"]
        table.row(rate_row(f"TLS by {name},", "down")).values.append(found["down"])
    head = f"GET /1 HTTP/1.1\r\nHost: {hosts[BROKER]}\r\n\r\n"
    _start_going(client, session, "/tmp/broker", _TLS_NAMES[BROKER], str(_TLS_PORT), head, "tls")
    os.kill(carrier_of(pid, "broker"), signal.SIGKILL)
    _tell_of_end(facts, "broker killed", _gone_on(partial(_read_inside, client, session, "/tmp/broker")))
    client.call("DELETE", f"/v1/sessions/{session}")


def tls_row(name: str) -> str:
    return f"TLS connection and a request, by {name}"


def _measure_published(table: Table, client: daemon.Client, session: str, share: float, chance: random.Random) -> None:
    """Have a server in a session send bytes, over a published port and within the session's own network, in turn."""
    place = f"/v1/sessions/{session}"
    started = client.call("POST", f"{place}/processes", {"argv": ["python3", "-c", _SENDER]})
    waited = {"port": _SENDER_PORT, "timeout_ms": 30_000}
    client.call("POST", f"{place}/processes/{started['exec_id']}/wait", waited)
    published = client.call("POST", f"{place}/previews", {"port": _SENDER_PORT, "access": "local"})["host_port"]
    network = client.call("POST", f"{place}/exec", {"cmd": "readlink /proc/self/ns/net"})["output"].strip()
    size = max(4 * MIB, round(512 * MIB * share))
    for name in blocks([PUBLISHED, DIRECT_PORT], max(2, round(6 * share)), chance):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM) if name == PUBLISHED else _socket_of(network)
        with sock:
            sock.connect(("127.0.0.1", published if name == PUBLISHED else _SENDER_PORT))
            began, left, room = time.perf_counter(), size, bytearray(256 * 1024)
            sock.sendall(b"%d" % size)
            while got := sock.recv_into(room):
                left -= got
            if left:
                raise RuntimeError(f"{name}: {left} bytes are missing")
            table.row(name).values.append(size / (time.perf_counter() - began) / 1e6)


def _measure_preview(
    table: Table,
    facts: dict[str, Any],
    pid: int,
    client: daemon.Client,
    session: str,
    count: int,
    chance: random.Random,
) -> None:
    """Ask a server in a session, over one connection to the gateway, over one to the server itself, and over new ones
    to it, as the gateway makes for each request. At last the gateway is killed."""
    place = f"/v1/sessions/{session}"
    started = client.call("POST", f"{place}/processes", {"argv": ["python3", "-c", _WEB_SERVER]})
    waited = {"port": _WEB_PORT, "timeout_ms": 30_000}
    client.call("POST", f"{place}/processes/{started['exec_id']}/wait", waited)
    opened = client.call("POST", f"{place}/previews", {"port": _WEB_PORT})
    name = urlsplit(opened["url"]).netloc
    head = f"GET / HTTP/1.1\r\nHost: {name}\r\nX-Sandkasten-Preview-Token: {opened['token']}\r\n\r\n".encode()
    network = client.call("POST", f"{place}/exec", {"cmd": "readlink /proc/self/ns/net"})["output"].strip()
    with ExitStack() as undo:
        talks = {
            PREVIEW: undo.enter_context(socket.create_connection(("127.0.0.1", urlsplit(opened["url"]).port or 0))),
            DIRECT: undo.enter_context(_socket_of(network)),
        }
        talks[DIRECT].connect(("127.0.0.1", _WEB_PORT))
        for each in talks.values():
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _ask(each, head)
        for kind in blocks([*talks, FRESH], count, chance):
            if kind == FRESH:
                with _socket_of(network) as sock, table.timed(kind):
                    sock.connect(("127.0.0.1", _WEB_PORT))
                    _ask(sock, head)
                continue
            with table.timed(kind):
                _ask(talks[kind], head)
        found = Path(undo.enter_context(tempfile.TemporaryDirectory())) / "found"
        address = "127.0.0.1", str(talks[PREVIEW].getpeername()[1])
        argv = [sys.executable, "-c", _GOING_ON, str(found), *address, head.decode()]
        undo.callback(undo.enter_context(subprocess.Popen(argv)).kill)
        _gone_round(partial(_read_here, found), 20)
        os.kill(carrier_of(pid, "gateway"), signal.SIGKILL)
        _tell_of_end(facts, "gateway killed", _gone_on(partial(_read_here, found)))


def _ask(sock: socket.socket, head: bytes) -> None:
    sock.sendall(head)
    data = b""
    while daemon.body_of(data) is None:
        if not (more := sock.recv(65536)):
            raise ConnectionResetError("the connection ended before the answer")
        data += more
    if not data.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(str(data[:200]))


def _socket_of(network: str) -> socket.socket:
    """Return a socket of the network that a process of the machine has, by the name of that (network_namespaces(7))."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    (link, *_) = (each for each in Path("/proc").glob("[0-9]*/ns/net") if _name_of(each) == network)
    there = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.setns(there, k.CLONE_NEWNET)
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    finally:
        syscalls.setns(here, k.CLONE_NEWNET)
        os.close(here)
        os.close(there)


def _name_of(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # it has ended
        return ""


def connect_row(name: str) -> str:
    return f"connect and first byte, {name}"


def rate_row(name: str, way: str) -> str:
    return f"{name} {way}, MB/s"


def _measure_creates(
    table: Table, client: daemon.Client, way_out: Mapping[str, Any], count: int, chance: random.Random
) -> None:
    """Create with and without a way out, and give one to a session that runs."""
    asked = {CREATE_NONE: {}, CREATE_ALLOW: {"network": way_out}}
    for name in blocks(list(asked), count, chance):
        time.sleep(_SETTLE_S)  # a sandbox of the pool is made anew meanwhile
        with table.timed(name):
            made = client.call("POST", "/v1/sessions", asked[name])
        if name == CREATE_NONE:
            with table.timed(PATCH):
                client.call("PATCH", f"/v1/sessions/{made['id']}", {"network": way_out})
        client.call("DELETE", f"/v1/sessions/{made['id']}")


def _measure_restarts(
    facts: dict[str, Any], data_dir: Path, environ: Mapping[str, str], way_out: Mapping[str, Any], share: float
) -> None:
    """End daemons and egress processes under a program that connects; tell what it noticed. The first way alone, which
    starts one daemon, for a small share."""
    ways = (
        ("egress process killed", False, True, environ),
        ("daemon killed", True, False, environ),
        ("daemon and egress process killed", True, True, environ),
        ("daemon killed, the next configured otherwise", True, False, {**environ, **_OTHERWISE}),
    )
    with ExitStack() as undo:
        pid, address = undo.enter_context(daemon.running(data_dir, **environ))
        client = undo.enter_context(daemon.Client(address))
        session, carrier, is_followed = client.call("POST", "/v1/sessions", {"network": way_out})["id"], 0, False
        for number, (what, ends_daemon, ends_carrier, then) in enumerate(
            ways if share >= _ALL_WAYS_SHARE else ways[:1]
        ):
            place = f"/tmp/{number}"
            _start_going(client, session, place, _NAME, str(_PORT))
            if not is_followed:
                carrier = carrier_of(pid)  # of a daemon that was killed it is nobody's child
            for each in (pid,) * ends_daemon + (carrier,) * ends_carrier:
                os.kill(each, signal.SIGKILL)
            is_followed = ends_daemon and not ends_carrier
            if ends_daemon:
                pid, address = undo.enter_context(daemon.running(data_dir, **then))
                client = undo.enter_context(daemon.Client(address))
            _tell_of_end(facts, what, _gone_on(partial(_read_inside, client, session, place)))
        client.call("DELETE", f"/v1/sessions/{session}")


def _start_going(client: daemon.Client, session: str, place: str, *target: str) -> None:
    """Start `_GOING_ON` in a session, and wait until it has gone round a while."""
    argv = ["python3", "-c", _GOING_ON, place, *target]
    client.call("POST", f"/v1/sessions/{session}/processes", {"argv": argv})
    _gone_round(partial(_read_inside, client, session, place), 20)


def _read_inside(client: daemon.Client, session: str, place: str) -> str:
    told = client.call("POST", f"/v1/sessions/{session}/exec", {"cmd": f"cat {place} 2>/dev/null"})
    return str(told["output"])


def _read_here(place: Path) -> str:
    return place.read_text() if place.exists() else ""


def _gone_on(read: Callable[[], str]) -> dict[str, Any]:
    """Return the findings of `_GOING_ON` after a while with a next daemon or process. `read` reads them."""
    return _gone_round(read, _gone_round(read, 20)["connects"] + _GOES_ON)


def _tell_of_end(facts: dict[str, Any], what: str, found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        facts[f"{what}: {name}"] = round(value) if isinstance(value, float) else value


def _gone_round(read: Callable[[], str], times: int) -> dict[str, Any]:
    """Wait until `_GOING_ON` has connected so often; return its findings."""
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        if (told := read()) and (found := dict(json.loads(told)))["connects"] >= times:
            return found
        time.sleep(0.05)
    raise RuntimeError("a program that connects does not go on")


if __name__ == "__main__":
    main()
