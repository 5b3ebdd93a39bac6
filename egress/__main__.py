"""Entry of the egress process, of the preview gateway and of the broker:
`python -I -B <directory of this file> [ROLE [WORD...]]`.

Owns the state of the process before its first foreign byte: every module imported, for the interpreter may lie where
the user that the process becomes can't read; no inherited descriptor; in a cgroup of its own; confined. A step that
fails is a log line and status 1; what the machine does not have is a warning. It ends when the daemon's socket, which
is descriptor 3, does, with status 0. `ROLE` is `egress`, the default, `gateway` or `broker`.

A word is `cgroup=PATH`, a cgroup to make and enter; `permit=NETWORK`, a private network that sessions may reach;
`proxy=URL`, the operator's proxy, and nothing else then; `data=PATH`, the data directory, and `ca=PATH`, a
file of more authorities, for the broker. They are the starter's, which takes them from root's configuration, and not
from the daemon, which may run without privilege.
"""

from __future__ import annotations

import os
import sys
from ipaddress import ip_network

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket


def _channel(fd: int) -> socket.socket:
    import socket

    channel = socket.socket(fileno=fd)
    if (channel.family, channel.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        raise OSError("descriptor 3 is no socket of the daemon")
    return channel


def main() -> int:
    """Prepare the process and serve; return its status."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # egress/http.py is not `http`
    sys.path.append(os.path.dirname(here))
    import codecs
    import gc
    import signal
    from functools import partial

    import trio

    from egress import barrier, gateway, resolver
    from egress.confinement import confine
    from egress.policy import parse_proxy
    from egress.protocol import CHANNEL_FD, USER_IDS
    from egress.server import log, log_fault, serve

    codecs.lookup("idna")  # else imported at the first name beyond ASCII
    role, *words = sys.argv[1:] or ["egress"]
    given: dict[str, list[str]] = {"cgroup": [], "permit": [], "proxy": [], "data": [], "ca": []}
    try:
        user_id = USER_IDS[role]
        for key, _, value in (word.partition("=") for word in words):
            given[key].append(value)
        permit = [ip_network(value) for value in given["permit"]]
        proxy, proxy_port = parse_proxy(*given["proxy"]) if given["proxy"] else (None, 0)
        if len(given["data"]) != (role == "broker"):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        log("error", "usage", reason="the arguments are a role, and cgroup=, permit=, proxy=, data= and ca=")
        return 2
    os.closerange(CHANNEL_FD + 1, os.sysconf("SC_OPEN_MAX"))
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # a terminal's: the daemon decides
    if role == "broker":
        return _run_broker(user_id, given["cgroup"], given["data"][0], "".join(given["ca"]))
    # A name is looked up as it is: with search domains, an allowed one could become another (resolv.conf(5)).
    os.environ["LOCALDOMAIN"] = ""
    try:
        channel = _channel(CHANNEL_FD)
        table = barrier.make_table(permit, resolver.own_addresses(), barrier.resolvers(), proxy)
        later = barrier.LaterAddresses(table)
        lacks = barrier.enclose(given["cgroup"], table if role == "egress" else None, proxy_port, later)
        confine(user_id, user_id, dials=role == "egress")
    except OSError as error:
        log("error", "not_confined", reason=str(error))
        return 1
    if lacks:
        log("warning", "less_protected", **lacks)
    gc.freeze()  # a full collection would look at all modules: 4 to 12 ms in which nothing is carried
    lookup = barrier.watch_resolvers(resolver.ask_machine, table, lambda: os._exit(1))
    try:
        if role == "gateway":
            return trio.run(gateway.serve, channel)
        return trio.run(partial(serve, channel, lookup, has_own=later.add))
    except BaseException as error:  # noqa: BLE001 - the last that this process says
        log_fault(None, error)
        return 1


def _run_broker(user_id: int, cgroups: list[str], data_dir: str, ca_file: str) -> int:
    """Prepare the broker and serve; return its status. It needs the library `cryptography`, which no other role has."""
    import gc

    import trio

    from egress import barrier, broker, safe
    from egress.authority import Authority, kept_authority, new_authority, outward_context
    from egress.confinement import confine
    from egress.protocol import CHANNEL_FD
    from egress.server import log, log_fault

    try:
        channel = _channel(CHANNEL_FD)
        outward = outward_context(ca_file or None)
        directory = safe.open_directory(data_dir, user_id if os.geteuid() == 0 else os.geteuid())
        certificates = os.memfd_create("certificate")  # closed in executed programs by default
        Authority(new_authority(), certificates).context_for("localhost")  # imports what it imports late
        lacks = barrier.enclose(cgroups, None)
        confine(user_id, user_id, dials=False, own_directory=directory)
        kept = safe.Safe(directory)
        authority = Authority(kept_authority(kept), certificates)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__  # a text may hold a value
        log("error", "not_ready", reason=reason)
        return 1
    if lacks:
        log("warning", "less_protected", **lacks)
    gc.freeze()  # as in `main`
    try:
        return trio.run(broker.serve, channel, kept, authority, outward)
    except BaseException as error:  # noqa: BLE001 - the last that this process says
        log_fault(None, error)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads whose look-up hangs are not waited for
