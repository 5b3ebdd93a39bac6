"""Notes to the service manager: ready, status, stopping, and signs of life.

Datagrams of `NAME=value` lines to the socket that `NOTIFY_SOCKET` names, a path or (with `@`) an abstract name. The
socket is connected at once, while the process can still reach it, and the variables are taken out of the environment. A
note that can't be delivered is dropped without waiting, since a deaf service manager is no reason to stop.

Sources: sd_notify(3), sd_watchdog_enabled(3); unix(7).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

_BEATS = 3
"""Signs of life within the watchdog's time: one or two that come late or get lost are no death."""

_MAX_STATUS_CHARACTERS = 200


class Notifier:
    """The service manager, or none. `beat_s`: the period of signs of life for the watchdog, None without one."""

    def __init__(self, sock: socket.socket | None = None, beat_s: float | None = None) -> None:
        self._socket = sock
        self.beat_s = beat_s

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 if there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def ready(self, status: str) -> None:
        """Report that the daemon serves."""
        self._send("READY=1", _status(status))

    def stopping(self, status: str) -> None:
        """Report that the daemon stops; the watchdog does not count any more."""
        self._send("STOPPING=1", _status(status))

    def alive(self, status: str) -> None:
        """Report a sign of life: every part that has to answer did."""
        self._send("WATCHDOG=1", _status(status))

    def say(self, status: str) -> None:
        """Report a status for people: present work, or the reason of the end."""
        self._send(_status(status))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            # MSG_NOSIGNAL: the end of the service manager must not end the daemon with SIGPIPE.
            self._socket.send("\n".join(lines).encode("utf-8", "replace"), socket.MSG_NOSIGNAL)
        except OSError as error:
            log.warning("service_manager_not_told", extra={"what": lines[0], "error": str(error)})


def open_notifier(environ: MutableMapping[str, str]) -> Notifier:
    """Connect to the service manager, if one listens; remove its variables in any case."""
    address = environ.pop("NOTIFY_SOCKET", "")
    beat_s = _beat_s(environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", ""))
    if not address.startswith(("/", "@")):
        return Notifier()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        sock.close()
        log.warning("service_manager_not_reached", extra={"error": str(error)})
        return Notifier()
    return Notifier(sock, beat_s)


def _beat_s(watchdog_usec: str, watchdog_pid: str) -> float | None:
    if not (watchdog_usec.isascii() and watchdog_usec.isdigit()) or int(watchdog_usec) == 0:
        return None
    if watchdog_pid and watchdog_pid != str(os.getpid()):
        return None  # the watchdog is for another process
    return int(watchdog_usec) / 1e6 / _BEATS


def _status(text: str) -> str:
    """Return the line; a line break in it would be a message of its own."""
    return f"STATUS={' '.join(text.split())[:_MAX_STATUS_CHARACTERS]}"
