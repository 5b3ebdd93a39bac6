"""The second check of addresses: what the kernel lets a process reach that checks nothing itself any more."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import egress
from egress import barrier
from egress.addresses import SPECIAL_V4, SPECIAL_V6, AddressCheck
from egress.barrier import HOOKS, MEMORY_BYTES, REACHABLE, RESOLVER, make_table, verdict
from egress.policy import Address
from egress.resolver import LookupFailed
from nsinit.cgroup.beside import name_cgroups, remove_cgroups, sweep
from nsinit.cgroup.tree import BESIDE, Tree, locate_process
from nsinit.kernel import constants as k
from tests.egress.conftest import OWN, add_own_address
from tests.egress.harness import METADATA, OTHER_PUBLIC, PRIVATE, PUBLIC, PUBLIC_V6, program
from tests.egress.taken_over import UNDOING, WAYS
from tests.waiting import patience, until

_ROOT = str(Path(egress.__file__).parents[1])
SERVER, PERMITTED = "10.9.9.9", "10.77.0.1"
REFUSED = (
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", PRIVATE, "172.16.0.1", "192.168.1.1", METADATA, "100.64.0.1", OWN),
    *("224.0.0.1", "255.255.255.255", "198.18.0.1", "240.0.0.1"),
    *("::1", "::", "fe80::1", "fd00::1", "ff02::1", "64:ff9b::a00:1", "2002:a00:1::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", f"::ffff:{OWN}"),
)
CONTROLLERS_ARE_V1 = "memory" in locate_process().v1
_BPF_MAP_LOOKUP_ELEM, _BPF_MAP_GET_FD_BY_ID, _BPF_PROG_QUERY = 1, 14, 16
_QUERY = struct.Struct("=4IQI")
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def cgroups() -> Iterator[list[str]]:
    """Paths for the cgroups of a process; they are gone afterwards."""
    named = name_cgroups("egress")
    yield named
    remove_cgroups(named)
    assert not any(map(os.path.exists, named))


def taken_over(cgroups: Sequence[str], **said: Any) -> dict[str, Any]:
    """Run `taken_over.py`; return its answer."""
    said = {"cgroups": cgroups, "permit": [], "servers": [], "targets": [], **said}
    code = f"import sys; sys.path.insert(0, {_ROOT!r}); from tests.egress import taken_over; taken_over.main()"
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code], input=json.dumps(said), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def attached(cgroup: str) -> int:
    """Return the number of programs that are attached to a cgroup itself, in the four places."""
    directory = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    found = 0
    try:
        for hook in HOOKS:
            ids = (ctypes.c_uint32 * 64)()
            query = ctypes.create_string_buffer(_QUERY.pack(directory, hook, 0, 0, ctypes.addressof(ids), len(ids)))
            assert _libc.syscall(k.SYS_bpf, _BPF_PROG_QUERY, query, _QUERY.size) == 0
            found += _QUERY.unpack_from(query)[-1]
    finally:
        os.close(directory)
    return found


def unified_above() -> str:
    """Return the cgroup v2 below which the one of a process is."""
    return next(each for each in map(os.path.dirname, name_cgroups("egress")) if os.path.exists(f"{each}/cgroup.type"))


def existing(paths: Sequence[str]) -> list[str]:
    """Return those of the paths that exist."""
    return [each for each in paths if os.path.exists(each)]


def processes_of(paths: Sequence[str]) -> set[str]:
    """Return the processes in cgroups."""
    return {pid for each in paths for pid in Path(each, "cgroup.procs").read_text().split()}


def limits_of(paths: Sequence[str]) -> set[str]:
    """Return the limits of memory and the weights of cgroups."""
    names = ("memory.max", "memory.limit_in_bytes", "cpu.weight", "cpu.shares")
    return {file.read_text().strip() for each in paths for name in names if (file := Path(each, name)).exists()}


# What is refused


@pytest.mark.usefixtures("outside")
def test_a_process_that_checks_nothing_reaches_no_private_address(cgroups: list[str]) -> None:
    """Each way to connect or to send fails with EPERM: to loopback, private, special and mapped addresses, and to the
    host's own; a public address is reached by each. In this world every address answers."""
    targets = [(address, 80) for address in (*REFUSED, PUBLIC, PUBLIC_V6)]
    answer = taken_over(cgroups, targets=targets)
    assert "address programs" not in answer["lacks"]
    found = answer["found"]
    refused = {f"{way} {address} 80": found[f"{way} {address} 80"] for way in WAYS for address in REFUSED}
    assert refused == dict.fromkeys(refused, f"errno {errno.EPERM}")
    for address in (PUBLIC, PUBLIC_V6):
        assert found[f"tcp {address} 80"] == found[f"fast open {address} 80"] == f"errno {errno.ECONNREFUSED}"
        assert found[f"udp {address} 80"] == found[f"datagram {address} 80"] == "done"


@pytest.mark.usefixtures("outside")
def test_permits_and_resolvers_are_reached(cgroups: list[str]) -> None:
    """A permitted network at each port; a resolver at port 53 alone, though it is on the loopback, or at an address of
    the host's own."""
    targets = [(PERMITTED, 80), (SERVER, 53), (SERVER, 80), ("127.0.0.53", 53), ("127.0.0.53", 54), (PRIVATE, 53)]
    servers = [SERVER, "127.0.0.53"]
    found = taken_over(cgroups, permit=["10.77.0.0/16"], servers=servers, later=[SERVER], targets=targets)["found"]
    for way in WAYS:
        for address, port in ((SERVER, 80), ("127.0.0.53", 54), (PRIVATE, 53)):
            assert found[f"{way} {address} {port}"] == f"errno {errno.EPERM}"
        for address, port in ((PERMITTED, 80), (SERVER, 53), ("127.0.0.53", 53)):
            assert found[f"{way} {address} {port}"] in ("done", f"errno {errno.ECONNREFUSED}")


@pytest.mark.usefixtures("outside")
def test_the_process_can_not_undo_it(cgroups: list[str]) -> None:
    """No way leads out of its cgroup, and no program can be detached: files and bpf(2) are closed to the process."""
    found = taken_over(cgroups)["found"]
    assert (found["leave"], found["detach"]) == (f"errno {errno.EACCES}", f"errno {errno.EPERM}")


@pytest.mark.usefixtures("outside")
def test_an_address_of_later_is_refused_and_stays_so(cgroups: list[str]) -> None:
    """A public address that became the host's is refused in both notations, one that is permitted by itself is not; and
    the confined process has no way to take one back."""
    targets = [(PUBLIC, 80), (f"::ffff:{PUBLIC}", 80), (PUBLIC_V6, 80), (OTHER_PUBLIC, 80)]
    later = [PUBLIC, PUBLIC_V6, OTHER_PUBLIC, "127.0.0.1"]
    found = taken_over(cgroups, permit=[f"{OTHER_PUBLIC}/32"], later=later, targets=targets)["found"]
    refused = {target for target in targets if all(found[f"{way} {target[0]} 80"] == "errno 1" for way in WAYS)}
    assert refused == set(targets[:3])
    assert {found[each] for each in UNDOING} == {f"errno {errno.EPERM}"}


@pytest.mark.usefixtures("outside")
async def test_the_process_adds_the_addresses_that_its_host_gets() -> None:
    """The kernel's table has an address soon after an interface has it."""
    async with program() as process:
        await process.daemon.attach("good.example")
        assert not is_in_map(process.pid, PUBLIC)
        add_own_address(PUBLIC)

        async def is_there() -> bool:
            return is_in_map(process.pid, PUBLIC)

        await until(is_there)


def is_in_map(pid: int, address: str) -> bool:
    """Tell whether the map that a process has open has an IPv4 address, as root can tell (bpf(2))."""
    texts = []
    for each in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by now
            texts.append(each.read_text())
    (number,) = (int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("map_id:"))
    map_fd = _libc.syscall(k.SYS_bpf, _BPF_MAP_GET_FD_BY_ID, struct.pack("=III", number, 0, 0), 12)
    assert map_fd >= 0
    key = ctypes.create_string_buffer(bytes(10) + b"\xff" * 2 + IPv4Address(address).packed, 16)
    value = ctypes.c_uint32(0)
    place = struct.pack("=I4x3Q", map_fd, ctypes.addressof(key), ctypes.addressof(value), 0)
    try:
        return int(_libc.syscall(k.SYS_bpf, _BPF_MAP_LOOKUP_ELEM, place, len(place))) == 0
    finally:
        os.close(map_fd)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_a_kernel_without_the_programs_is_told_of(cgroups: list[str], number: int) -> None:
    """The process goes on, in its cgroup, and says what it lacks."""
    lacks = taken_over(cgroups, without=number)["lacks"]
    assert lacks["address programs"] == f"bpf(2): {os.strerror(number)}"


def test_another_failure_ends_it(cgroups: list[str]) -> None:
    """A fault that no missing feature explains is not passed over."""
    with pytest.raises(AssertionError, match="Too many open files"):
        taken_over(cgroups, without=errno.EMFILE)


def test_a_machine_without_a_v2_tree_is_told_of(cgroups: list[str]) -> None:
    """Without any cgroup there are neither limits nor programs; each is named."""
    assert set(barrier.enclose((), make_table([], (), ()))) == {"memory limit", "processor weight", "address programs"}


# The table


_EDGES = [
    edge
    for text in (*SPECIAL_V4, *SPECIAL_V6, "2000::/3", "::ffff:0:0/96", "10.77.0.0/16")
    for network in [ip_network(text)]
    for edge in (int(network.network_address) - 1, int(network.network_address), int(network.broadcast_address) + 1)
    for edge in [edge if network.version == 6 else edge + (0xFFFF << 32)]
]
_ADDRESSES = st.one_of(
    st.sampled_from([IPv6Address(edge % 2**128) for edge in _EDGES]),
    st.ip_addresses(v=4),
    st.ip_addresses(v=6),
    st.sampled_from([ip_address(each) for each in ("127.0.0.1", "::1", OWN, "10.77.1.1", "0.0.0.0", "::")]),
)
_PERMITS = st.lists(
    st.sampled_from(
        [
            *("10.0.0.0/8", "10.77.0.0/16", "10.77.1.1/32", "127.0.0.0/8", "0.0.0.0/0", "0.0.0.0/32", f"{OWN}/32"),
            *("::/0", "::1/128", "fc00::/7", "fd00:1::/32", "::ffff:10.0.0.0/104", "0.0.0.0/7", "2001::/16"),
        ]
    ),
    max_size=4,
)
_OWN = {ip_address(OWN), ip_address("10.77.1.1"), ip_address("127.0.0.1"), ip_address("::1")}


@given(address=_ADDRESSES, permit=_PERMITS)
@example(address=IPv4Address("10.0.0.1"), permit=["::/0"])
@example(address=IPv6Address("::ffff:10.0.0.1"), permit=["::ffff:10.0.0.0/104"])
def test_the_table_says_what_the_first_check_says(address: Address, permit: list[str]) -> None:
    """For each address, permits and addresses of the host; a resolver adds the port of DNS and nothing else."""
    permits = [ip_network(each) for each in permit]
    wanted = 0 if AddressCheck(permits, _OWN).refusal(address) else REACHABLE
    assert verdict(make_table(permits, _OWN, ()), address) == wanted
    assert verdict(make_table(permits, _OWN, [address]), address) == wanted | RESOLVER


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nameserver 127.0.0.53\noptions edns0\n", {"127.0.0.53"}),
        (
            "# nameserver 9.9.9.9\nnameserver fe80::1%eth0\nnameserver  10.0.0.2 \nnameserver nonsense",
            {"fe80::1", "10.0.0.2"},
        ),
        ("search example\n", {"127.0.0.1"}),
    ],
)
def test_resolvers_are_those_of_the_c_library(
    text: str, found: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As resolv.conf(5) has it, this host without any."""
    (tmp_path / "resolv.conf").write_text(text)
    monkeypatch.setattr(barrier, "RESOLV_CONF", str(tmp_path / "resolv.conf"))
    assert {str(each) for each in barrier.resolvers()} == found


# The cgroup of the process


@pytest.mark.usefixtures("outside")
async def test_the_process_lives_in_its_cgroups_with_limits() -> None:
    """The process is there alone, with a memory limit and a weight below the usual one; the programs are attached there
    and nowhere above; all is gone with the process."""
    above = unified_above()
    before = attached(above)
    async with program() as process:
        assert processes_of(process.cgroups) == {str(process.pid)}
        if CONTROLLERS_ARE_V1:  # a v2 tree hands them down to no test: `test_cgroups_restart.py` has that
            assert limits_of(process.cgroups) == {str(MEMORY_BYTES), "512"}
            assert "less_protected" not in process.log_so_far()
        (unified,) = [each for each in process.cgroups if each.startswith(f"{above}/")]
        assert (attached(unified), attached(above)) == (len(HOOKS), before)
    assert existing(process.cgroups) == []


async def test_a_process_that_is_killed_leaves_no_cgroup() -> None:
    """After its end, whichever that was, its starter removes the cgroups."""
    async with program() as process:
        os.kill(process.pid, signal.SIGKILL)
        assert (await process.ended())[0] == -signal.SIGKILL
        assert existing(process.cgroups) == []


def test_what_a_killed_starter_leaves_is_swept_and_nothing_in_use() -> None:
    """An empty cgroup of that name goes, one with a process in it stays, and so does one of another name."""
    located = locate_process()
    left, used = name_cgroups("egress"), name_cgroups("egress")
    others = [f"{os.path.dirname(each)}/tests-other" for each in left]
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            for path in (*left, *used, *others):
                os.mkdir(path)
            for path in used:
                Path(path, "cgroup.procs").write_text(str(sleeper.pid))
            sweep(located, Tree("v2", {}))
            assert not any(map(os.path.exists, left))
            assert all(map(os.path.exists, (*used, *others)))
        finally:
            sleeper.kill()
            sleeper.wait(patience())
            remove_cgroups((*left, *used, *others))
    assert os.path.basename(left[0]).startswith(BESIDE)


# Resolvers


@pytest.mark.usefixtures("outside")
async def test_the_machines_resolver_is_asked_though_it_is_private() -> None:
    """A name is looked up in the real process, at the resolver that the machine has, wherever that is. An alias
    (CNAME) of a name with a private address is refused, and the log says why.
    """
    if "dns" not in Path("/etc/nsswitch.conf").read_text():  # noqa: ASYNC240 - a file of the machine's own
        pytest.skip("this machine asks no resolver by DNS")
    address = min(barrier.resolvers(), key=lambda each: each.version)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as server:
        server.bind((str(address), barrier.DNS_PORT))

        def answer() -> None:
            while (asked := server.recvfrom(512))[0] != b"end":
                data, client = asked
                is_a, same = data[-3] == 1, b"\xc0\x0c"  # the name that is asked for (RFC 1035, 4.1.4)
                records = [same + struct.pack("!HHIH", 1, 1, 60, 4) + IPv4Address(PUBLIC).packed]
                if data[12:18] == b"\5alias":
                    target = b"\6inside\7example\0"
                    records = [
                        same + struct.pack("!HHIH", 5, 1, 60, len(target)) + target,
                        target + struct.pack("!HHIH", 1, 1, 60, 4) + IPv4Address(PRIVATE).packed,
                    ]
                head = data[:2] + struct.pack("!5H", 0x8180, 1, len(records) * is_a, 0, 0)
                server.sendto(head + data[12:] + b"".join(records * is_a), client)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            async with program() as process:
                inside = await process.daemon.attach("good.example", "alias.example")
                assert (await inside.ask("good.example")).address is not None
                refusal = await inside.ask("alias.example")
                assert (refusal.code, refusal.extended) == (3, 15)
                assert (await process.daemon.entry(host="alias.example")).reason == "bad_address"
        finally:
            with socket.socket(family, socket.SOCK_DGRAM) as client:
                client.sendto(b"end", server.getsockname())
            thread.join()


def test_resolvers_that_change_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that fails is the end if the programs refuse a resolver of now, and only then."""
    conf = tmp_path / "resolv.conf"
    conf.write_text(f"nameserver {SERVER}\n")
    monkeypatch.setattr(barrier, "RESOLV_CONF", str(conf))

    def fail(name: str) -> Sequence[Address]:
        raise LookupFailed(name)

    ends: list[int] = []
    look_up = barrier.watch_resolvers(fail, make_table([], (), barrier.resolvers()), lambda: ends.append(1))
    for text, wanted in ((SERVER, []), ("9.9.9.9", []), (PRIVATE, [1])):
        conf.write_text(f"nameserver {text}\n")
        with pytest.raises(LookupFailed):
            look_up("good.example")
        assert ends == wanted
