"""Program of the tests: the egress process with another's will. It encloses and confines itself as the process does,
checks no address, tries to reach what its standard input says, and prints what came of each attempt."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from ipaddress import ip_address, ip_network

from egress import barrier, confinement
from egress.policy import parse_proxy
from egress.protocol import EGRESS_ID
from egress.resolver import own_addresses

_MSG_FASTOPEN = 0x20000000
_BPF_PROG_DETACH = 9
_ENOSYS = 38
UNDOING = {"lookup": 1, "delete": 3, "next": 4, "take": 21, "freeze": 22, "delete many": 27, "with flags": 2 | 1 << 16}
"""Commands of bpf(2) on a map (linux/bpf.h)."""


def _tcp(address: str, port: int) -> None:
    with socket.socket(_family(address)) as sock:
        sock.connect((address, port))


def _fast_open(address: str, port: int) -> None:
    with socket.socket(_family(address)) as sock:
        sock.sendto(b"x", _MSG_FASTOPEN, (address, port))


def _udp(address: str, port: int) -> None:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))


def _datagram(address: str, port: int) -> None:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", (address, port))


WAYS: dict[str, Callable[[str, int], None]] = {
    "tcp": _tcp,
    "fast open": _fast_open,
    "udp": _udp,
    "datagram": _datagram,
}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return f"errno {error.errno}"
    return "done"


def main() -> None:
    """Print a JSON object: what the machine lacks, and the outcomes by way, address and port."""
    said = json.load(sys.stdin)
    if "without" in said:

        def refuse(*_arguments: object) -> int:
            raise OSError(said["without"], os.strerror(said["without"]))

        vars(barrier)["_bpf"] = refuse
    proxy, port = parse_proxy(said["proxy"]) if "proxy" in said else (None, 0)
    servers = [ip_address(each) for each in said["servers"]]
    table = barrier.make_table([ip_network(each) for each in said["permit"]], own_addresses(), servers, proxy)
    later = barrier.LaterAddresses(table)
    lacks = barrier.enclose(said["cgroups"], table, port, later)
    confinement.confine(EGRESS_ID, EGRESS_ID)
    later.add([ip_address(each) for each in said.get("later", ())])
    found = {
        f"{way} {address} {port}": _outcome(lambda way=way, address=address, port=port: WAYS[way](address, port))  # type: ignore[misc]
        for address, port in said["targets"]
        for way in WAYS
    }
    above = os.path.dirname(said["cgroups"][-1])
    found["leave"] = _outcome(lambda: os.close(os.open(f"{above}/cgroup.procs", os.O_WRONLY)))
    key, value = ctypes.create_string_buffer(bytes(10) + b"\xff" * 2 + bytes(4), 16), ctypes.c_uint32(0)
    place = struct.pack("=i4x3Q", later._map_fd, ctypes.addressof(key), ctypes.addressof(value), 0)
    for name, command in UNDOING.items():
        found[name] = _outcome(lambda command=command: confinement.call("bpf", command, place, len(place)))  # type: ignore[misc]
    found["detach"] = _outcome(lambda: confinement.call("bpf", _BPF_PROG_DETACH, bytes(16), 16))
    print(json.dumps({"lacks": lacks, "found": found}))
    sys.stdout.flush()
    if said.get("waits"):
        sys.stdin.read()


if __name__ == "__main__":
    main()
