"""Entry of the egress process and of the preview gateway: `python -I -B <directory of this file> [ROLE [USER_ID]]`.

Owns the state of the process before its first foreign byte: every module imported, for the interpreter may lie where
the user that the process becomes can't read; no inherited descriptor; confined. A step that fails is a log line and
status 1. It ends when the daemon's socket, which is descriptor 3, does, with status 0. `ROLE` is `egress`, the default,
or `gateway`; `USER_ID` is the user and the group to become.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Prepare the process and serve; return its status."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # egress/http.py is not `http`
    sys.path.append(os.path.dirname(here))
    import codecs
    import signal
    import socket

    import trio

    from egress import gateway
    from egress.confinement import confine
    from egress.protocol import CHANNEL_FD, EGRESS_ID, GATEWAY_ID
    from egress.resolver import ask_machine
    from egress.server import log, log_fault, serve

    codecs.lookup("idna")  # else imported at the first name beyond ASCII
    role, *given = sys.argv[1:] or ["egress"]
    given = given or [str(GATEWAY_ID if role == "gateway" else EGRESS_ID)]
    if role not in ("egress", "gateway") or len(given) > 1 or not given[0].isdecimal() or given[0] == "0":
        log("error", "usage", reason="the arguments are a role and a user id other than root's")
        return 2
    user_id = int(given[0])
    os.closerange(CHANNEL_FD + 1, os.sysconf("SC_OPEN_MAX"))
    # A name is looked up as it is: with search domains, an allowed one could become another (resolv.conf(5)).
    os.environ["LOCALDOMAIN"] = ""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # a terminal's: the daemon decides
    try:
        channel = socket.socket(fileno=CHANNEL_FD)
        if (channel.family, channel.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            raise OSError("descriptor 3 is no socket of the daemon")
        confine(user_id, user_id)
    except OSError as error:
        log("error", "not_confined", reason=str(error))
        return 1
    try:
        return trio.run(gateway.serve, channel) if role == "gateway" else trio.run(serve, channel, ask_machine)
    except BaseException as error:  # noqa: BLE001 - the last that this process says
        log_fault(None, error)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads whose look-up hangs are not waited for
