"""Entry of the egress process and of the preview gateway: `python -I -B <directory of this file> [ROLE [WORD...]]`.

Owns the state of the process before its first foreign byte: every module imported, for the interpreter may lie where
the user that the process becomes can't read; no inherited descriptor; in a cgroup of its own; confined. A step that
fails is a log line and status 1; what the machine does not have is a warning. It ends when the daemon's socket, which
is descriptor 3, does, with status 0. `ROLE` is `egress`, the default, or `gateway`. A word is `cgroup=PATH`, a cgroup
to make and enter, or `permit=NETWORK`, a private network that sessions may reach: the starter's words, which are root's
configuration, and not the daemon's, which may run without privilege.
"""

from __future__ import annotations

import os
import sys
from ipaddress import ip_network


def main() -> int:
    """Prepare the process and serve; return its status."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # egress/http.py is not `http`
    sys.path.append(os.path.dirname(here))
    import codecs
    import signal
    import socket

    import trio

    from egress import barrier, gateway, resolver
    from egress.confinement import confine
    from egress.protocol import CHANNEL_FD, EGRESS_ID, GATEWAY_ID
    from egress.server import log, log_fault, serve

    codecs.lookup("idna")  # else imported at the first name beyond ASCII
    role, *words = sys.argv[1:] or ["egress"]
    try:
        user_id = {"egress": EGRESS_ID, "gateway": GATEWAY_ID}[role]
        given = [word.partition("=")[::2] for word in words]
        cgroups = [value for key, value in given if key == "cgroup"]
        permit = [ip_network(value) for key, value in given if key == "permit"]
    except (KeyError, ValueError):
        log("error", "usage", reason="the arguments are a role, cgroup=PATH and permit=NETWORK")
        return 2
    os.closerange(CHANNEL_FD + 1, os.sysconf("SC_OPEN_MAX"))
    # A name is looked up as it is: with search domains, an allowed one could become another (resolv.conf(5)).
    os.environ["LOCALDOMAIN"] = ""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # a terminal's: the daemon decides
    try:
        channel = socket.socket(fileno=CHANNEL_FD)
        if (channel.family, channel.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            raise OSError("descriptor 3 is no socket of the daemon")
        table = barrier.make_table(permit, resolver.own_addresses(), barrier.resolvers())
        lacks = barrier.enclose(cgroups, table if role == "egress" else None)
        confine(user_id, user_id, dials=role == "egress")
    except OSError as error:
        log("error", "not_confined", reason=str(error))
        return 1
    if lacks:
        log("warning", "less_protected", **lacks)
    lookup = barrier.watch_resolvers(resolver.ask_machine, table, lambda: os._exit(1))
    try:
        if role == "gateway":
            return trio.run(gateway.serve, channel)
        return trio.run(serve, channel, lookup)
    except BaseException as error:  # noqa: BLE001 - the last that this process says
        log_fault(None, error)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads whose look-up hangs are not waited for
