"""Attacks through a session's way out: at the node, its networks, its resolver, other sessions, and the way out itself.

The truth comes from outside. A listener of the attack's own hears a connection or does not; and the log of the way out
says whether an address was dialled. A reset inside says nothing, since a dial that fails ends in one, too.

An attacker with a name of its own lets it lead where it likes. The names that every machine has for itself stand for
such a name: a rule allows them, and they lead to its loopback. No public address is dialled.

Sources: network_namespaces(7), ip(7), RFC 1035, RFC 6066, RFC 6890, RFC 8446.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import orjson
import trio

from egress import policy
from egress.names import place_of
from egress.policy import InvalidRule, canonical_name
from nsinit.cgroup.beside import name_cgroups, remove_cgroups
from sandkasten.model.network import EgressVerdict, Network, NetworkMode
from sandkasten.security.attacks.field import Field
from sandkasten.security.probes.attempt import HELD, Answers, NotApplicable, attempt, collect

SPECIAL = (
    *("169.254.169.254", "169.254.170.2", "100.100.100.200"),  # metadata services
    *("10.0.0.1", "172.16.0.1", "172.17.0.1", "192.168.0.1", "192.168.1.1", "100.64.0.1", "192.0.0.1", "192.0.2.1"),
    *("198.51.100.1", "203.0.113.1", "192.88.99.1", "240.0.0.1"),
)
_OWN_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_NEVER_GIVEN = ("198.18.1.0:80", "198.18.77.77:443", "198.19.255.254:22", "198.18.0.1:61080")
"""Addresses that stand for names, of other sessions' perhaps; the last is the listener of the way out."""

AT_ONCE = """
import threading
def at_once(work, arguments):
    threads = [threading.Thread(target=work, args=each) for each in arguments]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""
"""Text of `at_once`, for programs in a sandbox, which calls `work` with all of the arguments, each in a thread."""

TOOLS = """
import errno, json, os, socket, struct, sys, time
RESOLVER = ("198.18.0.1", 53)
def question(name, kind=1):
    labels = b"".join(bytes([len(each)]) + each for each in name.encode().split(b"."))
    return struct.pack("!6H", os.getpid() & 0xffff, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!BHH", 0, kind, 1)
def ask(name, seconds=4):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(1)
        for turn in range(seconds):  # a datagram is lost where too many wait: resolvers ask again
            client.sendto(question(name), RESOLVER)
            try:
                return client.recv(2048)
            except TimeoutError:
                if turn == seconds - 1:
                    raise
def code(name, seconds=4):
    try:
        return "code %d" % (ask(name, seconds)[3] & 15)
    except OSError as error:
        return type(error).__name__
"""
_REACH = (
    TOOLS
    + AT_ONCE
    + """
def reach(target):
    host, _, port = target.rpartition(":")
    try:
        if not host[:1].isdigit():
            answer = ask(host)
            if answer[3] & 15 or answer[6:8] == b"\\0\\0":
                return
            host = socket.inet_ntoa(answer[-4:])
        with socket.create_connection((host, int(port)), timeout=4) as client:
            client.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            client.recv(64)
    except OSError:
        pass
at_once(reach, [(each,) for each in sys.argv[1:]])
"""
)
_CRAFT = (
    TOOLS
    + """
head = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0)
end = b"\\0\\0\\1\\0\\1"
crafted = [b"", b"\\0", head, head + b"\\xc0\\x0c" + end[1:], head + b"\\xc0\\xff" + end[1:], head + b"\\x3f" * 200,
           head + b"\\xff" * 400, head + (b"\\1a" * 127) + end, question("a" * 60) * 9, os.urandom(512)[:512],
           struct.pack("!6H", 7, 0x8180, 1, 1, 0, 0) + end, struct.pack("!6H", 7, 0, 65535, 65535, 65535, 65535) + end,
           struct.pack("!6H", 7, 0x7900, 1, 0, 0, 0) + end, question("x.example", 255), question("x.example", 252),
           head + b"\\7" + bytes(range(7)) + end, head + b"\\3\\xff\\xfe\\x80" + end, os.urandom(60000)]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    for _ in range(20):
        for each in crafted:
            try:
                client.sendto(each, RESOLVER)
            except OSError:
                pass
streams = []
for each in crafted:
    client = socket.create_connection(("9.9.9.9", 53), timeout=4)
    client.sendall(struct.pack("!H", 65535) + each)
    streams.append(client)
ends = time.monotonic() + float(sys.argv[1])
while (said := code("never.example")) == "TimeoutError" and time.monotonic() < ends:
    pass  # the question may have been lost among those before (udp(7))
print(said)
"""
)
_FLOOD = (
    TOOLS
    + """
streams, ends = [], time.monotonic() + 6
print("flooding", flush=True)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.setblocking(False)
    number = 0
    while time.monotonic() < ends:
        number += 1
        try:
            client.sendto(question("%d.example" % number), RESOLVER)
        except OSError:
            pass
        if number % 20 == 0:
            try:
                stream = socket.socket()
                stream.setblocking(False)
                stream.connect_ex(("9.9.9.9" if number % 40 else "10.0.0.1", 53 if number % 80 else 443))
                streams = (streams + [stream])[-60:]
            except OSError:
                pass
"""
)
_SEIZE = """
import errno, socket
found = {}
for name, kind, port in (("listener", socket.SOCK_STREAM, 61080), ("questions", socket.SOCK_DGRAM, 53)):
    for address in ("198.18.0.1", "0.0.0.0"):
        with socket.socket(socket.AF_INET, kind) as taker:
            try:
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                    taker.setsockopt(socket.SOL_SOCKET, option, 1)
                taker.bind((address, port))
                if kind == socket.SOCK_STREAM:
                    taker.listen()
                found[name] = "taken"
            except OSError as error:
                found.setdefault(name, errno.errorcode[error.errno])
import json
print(json.dumps(found))
"""


_ASK_PROXY = """
import json, socket, sys
said = {}
for target in json.loads(sys.argv[1]):
    for request in ("CONNECT {0} HTTP/1.1\\r\\nHost: {0}\\r\\n\\r\\n",
                    "GET http://{0}/ HTTP/1.1\\r\\nHost: {0}\\r\\nConnection: close\\r\\n\\r\\n"):
        try:
            with socket.create_connection(("198.18.0.1", 3128), timeout=20) as client:
                client.sendall(request.format(target).encode())
                found = client.recv(64)[9:12].decode() or "closed"
        except OSError as error:
            found = type(error).__name__
        said[target] = max(said.get(target, ""), found) if found[:1] != "2" else "200"
print(json.dumps(said))
"""
_NODE_IN_DISGUISE = (
    *(
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "0177.0.0.1",
        "0",
        "0.0.0.0",
        "localhost",
        "localhost.",
    ),
    *(
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
    ),
    *("allowed.example@127.0.0.1", "127.0.0.1#allowed.example", "127.0.0.1%00", "allowed.example\\r\\nHost: 127.0.0.1"),
)
"""Ways to write the loopback, some of which are none."""

_SAY_FIRST = f"""{AT_ONCE}
import json, socket, sys
def say(address, data):
    try:
        with socket.create_connection((address, 443), timeout=20) as client:
            client.sendall(bytes.fromhex(data))
            client.recv(1)
    except OSError:
        pass
at_once(say, json.loads(sys.argv[1]).items())
"""

_TAKE_ALL = """
import socket, time
held = []
for _ in range({}):
    try:
        held.append(socket.create_connection(("9.9.9.9", 53), timeout=4))
    except OSError:  # beyond the limit
        pass
time.sleep(60)
"""

_TAKEN_OVER = """
import json, socket, sys
sys.path.append(sys.argv[1])
from ipaddress import ip_network
from egress import barrier, confinement, protocol, resolver
said = json.load(sys.stdin)
table = barrier.make_table(map(ip_network, said["permit"]), resolver.own_addresses(), ())
lacks = barrier.enclose(said["cgroups"], table)
confinement.confine(protocol.EGRESS_ID, protocol.EGRESS_ID)
found = {}
for address in said["addresses"]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as client:
            client.settimeout(4)
            try:
                client.connect((address, said["port"]))
                found[address] = "reached"
            except PermissionError:
                found.setdefault(address, "refused")
            except OSError as error:
                found[address] = str(error)
print(json.dumps([lacks, found]))
"""
"""Program of an egress process that was taken over after its start: it checks no address."""


@attrs.define
class _Listener:
    """A listener outside, and the number of connections that it took."""

    port: int
    heard: int = 0

    @property
    def answer(self) -> str:
        return f"heard {self.heard}" if self.heard else "heard nothing"


def own_address() -> str | None:
    """Return the address that this machine has on the way to others, None without any. Sends nothing (udp(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        try:
            client.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(client.getsockname()[0])


@asynccontextmanager
async def _listener(*addresses: str) -> AsyncIterator[_Listener]:
    """Listen on one port of these addresses of the node."""
    async with trio.open_nursery() as nursery:
        first = trio.socket.socket()
        sockets = [first]
        try:
            await first.bind((addresses[0], 0))
            found = _Listener(first.getsockname()[1])
            for address in addresses[1:]:
                sockets.append(trio.socket.socket())
                await sockets[-1].bind((address, found.port))

            async def accept(sock: trio.socket.SocketType) -> None:
                while True:
                    client, _ = await sock.accept()
                    found.heard += 1
                    client.close()

            for each in sockets:
                each.listen()
                nursery.start_soon(accept, each)
            yield found
            nursery.cancel_scope.cancel()
        finally:
            for each in sockets:
                each.close()


async def _reach(field: Field, session_id: str, targets: Sequence[str]) -> Answers:
    """Have a session reach for each target; return what the log of its way out says of each host."""
    return await _try(field, session_id, _REACH, targets, [each.rpartition(":")[0] for each in targets])


async def _try(
    field: Field, session_id: str, program: str, words: Sequence[str], hosts: Iterable[str]
) -> dict[str, str]:
    """Run a program with these arguments in a session; return what the log of its way out says of each host."""
    result = await field.python(session_id, f"import sys; sys.argv[1:] = {list(words)!r}\n{program}")
    if result.end.exit_code != 0:
        return {"program": f"{result.end.cause}: {result.stderr[-200:].decode(errors='replace')}"}
    answers = dict.fromkeys(hosts, "is not in the log")
    for entry in (await field.supervisor.egress_log(session_id)).entries:
        if entry.host in answers and answers[entry.host] != "dialled":
            is_dialled = entry.verdict is EgressVerdict.ALLOWED or entry.address is not None
            answers[entry.host] = "dialled" if is_dialled else entry.reason or entry.verdict.value
    return answers


def not_permitted(field: Field, addresses: Collection[str]) -> list[str]:
    """Leave out what the operator permits sessions to reach."""
    permitted = [ipaddress.ip_network(each) for each in field.config.egress.permit]
    return [each for each in addresses if not any(ipaddress.ip_address(each) in network for network in permitted)]


async def _ask_other(field: Field, session_id: str) -> str:
    """Return what another session's question is answered with."""
    result = await field.python(session_id, f"{TOOLS}print(code('other.example', 8))", timeout_s=15)
    return result.stdout.decode().strip() or result.stderr[-60:].decode(errors="replace")


_OPEN = Network(NetworkMode.OPEN)
_HELD, _WANTED = 100, 400


@attempt("egress.node", "reach a service of the node by the node's own address", "server-side request forgery",
         ("heard nothing", "bad_address"))  # fmt: skip
async def reach_node(field: Field) -> Answers:
    address = own_address()
    if address is None:
        raise NotApplicable("this machine has no address but its loopback")
    async with _listener(address) as listener, field.session(network=_OPEN) as session_id:
        found = await _reach(field, session_id, [f"{address}:{listener.port}"])
        return {**found, "listener": listener.answer}


@attempt(
    "egress.private", "reach metadata services and private networks", "server-side request forgery", ("bad_address",)
)
async def reach_special(field: Field) -> Answers:
    async with field.session(network=_OPEN) as session_id:
        return await _reach(field, session_id, [f"{each}:80" for each in not_permitted(field, SPECIAL)])


@attempt("egress.own-name", "reach the node by an allowed name that leads to its loopback", "DNS rebinding",
         ("heard nothing", "bad_address", "no such name"))  # fmt: skip
async def reach_by_name(field: Field) -> Answers:
    names = []
    for name in {*_OWN_NAMES, socket.gethostname()}:
        try:
            names.append(canonical_name(name))
        except InvalidRule:
            continue
    async with _listener("127.0.0.1") as listener:
        targets = [f"{name}:{listener.port}" for name in names]
        async with field.session(network=Network(NetworkMode.ALLOW, allow=targets)) as session_id:
            found = await _reach(field, session_id, targets)
        found = {name: "no such name" if each == "is not in the log" else each for name, each in found.items()}
        return {**found, "listener": listener.answer}


@attempt("egress.proxy", "reach the node through the session's proxy, by every way to write its loopback",
         "server-side request forgery", ("heard nothing", "400", "403", "502"))  # fmt: skip
async def reach_by_proxy(field: Field) -> Answers:
    async with _listener("127.0.0.1") as listener, field.session(network=_OPEN) as session_id:
        targets = orjson.dumps([f"{each}:{listener.port}" for each in _NODE_IN_DISGUISE]).decode()
        result = await field.python(session_id, f"import sys; sys.argv[1:] = [{targets!r}]\n{_ASK_PROXY}")
        return {**orjson.loads(result.stdout), "listener": listener.answer}


@attempt("egress_process.taken-over", "reach the node as the process that carries connections, taken over",
         "server-side request forgery", ("refused", "heard nothing"), users=("",))  # fmt: skip
async def take_over(field: Field) -> Answers:
    """A process with the confinement of the real one, without its check of addresses: the kernel's check is left."""
    if os.geteuid() != 0:
        raise NotApplicable("this attack starts a process as root, as the daemon's launcher does")
    own = [each for each in (own_address(),) if each is not None]
    cgroups = name_cgroups("egress")
    async with _listener("127.0.0.1", *own) as listener:
        targets = not_permitted(field, ["127.0.0.1", *own, *SPECIAL, "::1", "::ffff:127.0.0.1", "fd00::1"])
        said = {"permit": field.config.egress.permit, "cgroups": cgroups, "addresses": targets, "port": listener.port}
        code = [sys.executable, "-I", "-B", "-c", _TAKEN_OVER, str(Path(policy.__file__).parents[1])]
        try:
            done = await trio.run_process(code, stdin=orjson.dumps(said), capture_stdout=True)
        finally:
            remove_cgroups(cgroups)
        lacks, found = orjson.loads(done.stdout)
        if (reason := lacks.get("address programs")) is not None:
            raise NotApplicable(f"the kernel checks no address here: {reason}")
        return {**found, "listener": listener.answer}


@attempt("egress.unanswered", "reach the node while nobody has answered whether a host may be reached",
         "server-side request forgery", ("heard nothing", "asked", "unanswered"))  # fmt: skip
async def reach_unanswered(field: Field) -> Answers:
    async with _listener("127.0.0.1") as listener, field.session(network=Network(NetworkMode.ASK)) as session_id:
        targets = (f"localhost:{listener.port}", f"127.0.0.1.example:{listener.port}")
        found = await _reach(field, session_id, targets)
        return {**found, "listener": listener.answer}


@attempt("egress.other-addresses", "reach addresses without a rule, and those that stand for another session's names",
         "leak between sessions", ("unknown_address", "not_allowed"))  # fmt: skip
async def reach_unruled(field: Field) -> Answers:
    """One of the addresses stands for a name that a neighbour has just asked for."""
    ruled = Network(NetworkMode.ALLOW, allow=["never.example"])
    async with field.session(network=Network(NetworkMode.ASK)) as other, field.session(network=ruled) as session_id:
        given = f"{place_of('neighbour.example')}:80"
        answer = await field.python(other, f"{TOOLS}print(socket.inet_ntoa(ask('neighbour.example')[-4:]), end=':80')")
        found = await _reach(field, session_id, [given, *_NEVER_GIVEN, "10.0.0.1:80", "127.0.0.53.example:80"])
        return found if answer.stdout.decode() == given else {**found, given: "the neighbour has no such address"}


def _vector(data: bytes, length_bytes: int) -> bytes:
    return len(data).to_bytes(length_bytes, "big") + data


def _extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "big") + _vector(data, 2)


def _names(*names: str) -> bytes:
    """Return the extension that has the server's name (RFC 6066, 3), or several."""
    return _extension(0, _vector(b"".join(b"\0" + _vector(each.encode(), 2) for each in names), 2))


def _hello(*extensions: bytes, record_bytes: int = 1 << 14) -> bytes:
    """Return a ClientHello (RFC 8446, 4.1.2) in records of at most so many bytes."""
    body = b"\3\3" + bytes(32) + _vector(bytes(32), 1) + _vector(b"\x13\1", 2) + b"\1\0"
    message = b"\1" + _vector(body + _vector(b"".join(extensions), 2), 3)
    pieces = [message[at : at + record_bytes] for at in range(0, len(message), record_bytes)]
    return b"".join(b"\x16\3\1" + _vector(each, 2) for each in pieces)


_ENCRYPTED = _extension(0xFE0D, bytes(64))  # encrypted_client_hello (RFC 9849)
_FOR_OTHERS = {
    "another.example": _hello(_names("other.example")),
    "none.example": _hello(),
    "encrypted.example": _hello(_names("other.example"), _ENCRYPTED),
    "only-encrypted.example": _hello(_ENCRYPTED),
    "two-names.example": _hello(_names("two-names.example", "other.example")),
    "named-twice.example": _hello(_names("named-twice.example"), _names("other.example")),
    "zero.example": _hello(_names("zero.example\0.other.example")),
    "below.example": _hello(_names("other.below.example")),
    "address.example": _hello(_names("127.0.0.1")),
    "in-pieces.example": _hello(_names("other.example"), record_bytes=1),
    "warned.example": b"\x15\3\1\0\2\1\0" + _hello(_names("other.example")),
    "padded.example": _hello(_extension(21, bytes(16_000)), _names("other.example")),
    "ssl-2.example": b"\x80\x2e\1\3\1\0\3\0\0\0\x20\0\0\x2f" + bytes(34),
    "http.example": b"GET / HTTP/1.1\r\nHost: http.example\r\n\r\n",
    "ssh.example": b"SSH-2.0-x\r\n",
}
"""Beginnings of connections to these names that are for another one, or may be, for some server."""


@attempt("egress.server-name", "reach another server than the allowed one by what a connection begins with",
         "domain fronting", ("sni", "not_tls", "the right one passes"))  # fmt: skip
async def name_another_server(field: Field) -> Answers:
    """The names are allowed and don't exist, so a beginning that passes is answered otherwise. The one that is right
    passes, and leads to the node's loopback, which is refused by its address."""
    said = {**_FOR_OTHERS, "localhost": _hello(_names("localhost"))}
    texts = orjson.dumps({str(place_of(name)): data.hex() for name, data in said.items()}).decode()
    network = Network(NetworkMode.ALLOW, allow=[f"{name}:443" for name in said])
    async with field.session(network=network) as session_id:
        answers = await _try(field, session_id, _SAY_FIRST, [texts], said)
    # It is dialled where the operator permits the loopback, and a machine may know no address of that name.
    if answers.get("localhost") in ("bad_address", "dialled", "resolver"):
        answers["localhost"] = "the right one passes"
    return answers


@attempt("egress.resolver", "crash or confuse the resolver with crafted questions", "CVE-2017-14491", ("code 3",))
async def craft_questions(field: Field) -> Answers:
    """Ask whatever a parser may trip over; then the resolver must still say that a name does not exist."""
    async with field.session(network=_allow_none()) as session_id, field.session(network=_allow_none()) as other:
        answer_s = 8 * field.patience
        result = await field.python(session_id, f"import sys; sys.argv[1:] = ['{answer_s}']\n{_CRAFT}")
        said = result.stdout.decode().strip() or result.stderr[-60:].decode(errors="replace")
        return {"attacker": said, "other session": await _ask_other(field, other)}


@attempt("egress.flood", "drown the process that carries the connections of all sessions", "denial of service",
         ("code 3",))  # fmt: skip
async def flood(field: Field) -> Answers:
    async with field.session(network=_allow_none()) as session_id, field.session(network=_allow_none()) as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(field.python, session_id, _FLOOD)
            answers = {}
            for turn in ("first", "second", "third"):
                await trio.sleep(0.3)  # time for some thousand questions
                answers[turn] = await _ask_other(field, other)
            nursery.cancel_scope.cancel()
        return answers


@attempt("egress.undo", "undo the route and the steering, take the sockets over", "network tampering",
         (HELD, "EADDRINUSE", "EADDRNOTAVAIL", "EACCES", "EPERM", "bad_address"))  # fmt: skip
async def undo(field: Field) -> Answers:
    """After all attempts the way out must still decide."""
    names = ("sockets.routes", "sockets.links", "sockets.raw", "sockets.nftables")
    async with field.session(network=_OPEN) as session_id:
        result = await field.probe(session_id, *names, timeout_s=10)
        answers = dict.fromkeys(names, "no answer")
        for line in result.stdout.splitlines():
            said = orjson.loads(line)
            answers[str(said["id"])] = HELD if said["verdict"] == HELD else str(said["seen"])
        seized = orjson.loads((await field.python(session_id, _SEIZE)).stdout)
        return {**answers, **seized, **await _reach(field, session_id, ["10.0.0.1:80"])}


@attempt("egress.hold", "take all connections of ways out, and keep them beyond the session's end", "denial of service",
         ("0 open", "code 3"))  # fmt: skip
async def hold(field: Field) -> Answers:
    """Another session is answered while the attacker has all that one may have."""
    program = _TAKE_ALL.format(_WANTED)
    async with field.session(network=_allow_none()) as session_id, trio.open_nursery() as nursery:
        async with field.session(network=_allow_none()) as other:
            nursery.start_soon(field.python, session_id, program)
            await _until_open(field, _HELD, sys.maxsize)
            said = await _ask_other(field, other)
        await field.supervisor.destroy(session_id)
        nursery.cancel_scope.cancel()
    with trio.move_on_after(5 * field.patience):
        await _until_open(field, 0, 0)
    return {"connections": f"{await _open_connections(field):.0f} open", "other session": said}


async def _until_open(field: Field, least: int, most: int) -> None:
    while not least <= await _open_connections(field) <= most:  # noqa: ASYNC110 - the process tells when it likes
        await trio.sleep(0.05)


async def _open_connections(field: Field) -> float:
    name = "sandkasten_egress_connections_open"
    return sum(s.value for metric in await field.supervisor.metrics() if metric.name == name for s in metric.samples)


def _allow_none() -> Network:
    return Network(NetworkMode.ALLOW, allow=["allowed.example"])


WAYS_OUT = collect(globals())
