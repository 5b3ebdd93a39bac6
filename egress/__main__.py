"""Entry of the egress process, of the preview gateway and of the broker:
`python -I -B <directory of this file> [ROLE [PLACES] [USER_ID]]`.

Owns the state of the process before its first foreign byte: every module imported, for the interpreter may lie where
the user that the process becomes can't read; no inherited descriptor; confined. A step that fails is a log line and
status 1. It ends when the daemon's socket, which is descriptor 3, does, with status 0. `ROLE` is `egress`, the default,
`gateway` or `broker`; the broker's places are the data directory and a file of more authorities, or nothing for none;
`USER_ID` is the user and the group to become.
"""

from __future__ import annotations

import os
import sys

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
    import signal

    import trio

    from egress import gateway
    from egress.confinement import confine
    from egress.protocol import CHANNEL_FD, USER_IDS
    from egress.resolver import ask_machine
    from egress.server import log, log_fault, serve

    codecs.lookup("idna")  # else imported at the first name beyond ASCII
    role, *given = sys.argv[1:] or ["egress"]
    places, given = (given[:2], given[2:]) if role == "broker" else ([], given)
    given = given or [str(USER_IDS.get(role, 0))]
    is_placed = len(places) == (2 if role == "broker" else 0)
    if role not in USER_IDS or not is_placed or len(given) > 1 or not given[0].isdecimal() or given[0] == "0":
        log("error", "usage", reason="the arguments are a role, its places, and a user id other than root's")
        return 2
    user_id = int(given[0])
    os.closerange(CHANNEL_FD + 1, os.sysconf("SC_OPEN_MAX"))
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # a terminal's: the daemon decides
    if role == "broker":
        return _run_broker(user_id, *places)
    # A name is looked up as it is: with search domains, an allowed one could become another (resolv.conf(5)).
    os.environ["LOCALDOMAIN"] = ""
    try:
        channel = _channel(CHANNEL_FD)
        confine(user_id, user_id)
    except OSError as error:
        log("error", "not_confined", reason=str(error))
        return 1
    try:
        return trio.run(gateway.serve, channel) if role == "gateway" else trio.run(serve, channel, ask_machine)
    except BaseException as error:  # noqa: BLE001 - the last that this process says
        log_fault(None, error)
        return 1


def _run_broker(user_id: int, data_dir: str, ca_file: str) -> int:
    """Prepare the broker and serve; return its status. It needs the library `cryptography`, which no other role has."""
    import trio

    from egress import broker, safe
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
        confine(user_id, user_id, own_directory=directory)
        kept = safe.Safe(directory)
        authority = Authority(kept_authority(kept), certificates)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__  # a text may hold a value
        log("error", "not_ready", reason=reason)
        return 1
    try:
        return trio.run(broker.serve, channel, kept, authority, outward)
    except BaseException as error:  # noqa: BLE001 - the last that this process says
        log_fault(None, error)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads whose look-up hangs are not waited for
