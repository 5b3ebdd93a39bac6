"""Bandwidth of one session: an equal share of it for each open connection, which the kernel keeps to.

TCP spaces out what it sends when its socket has a rate, without a queueing discipline (SO_MAX_PACING_RATE, since Linux
4.13: net/ipv4/tcp_output.c, tcp_update_skb_after_send). What goes up is sent by the socket outside, what comes down by
the session's. The first segments of a connection are not spaced out, and what lies in buffers has been sent already.
"""

from __future__ import annotations

import socket
import struct

_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h
_UNLIMITED = 2**32 - 1
"""No rate, as the kernel takes it in 4 bytes (net/core/sock.c); others are bytes in a second."""

_BYTES_OF_MBIT = 125_000
_TOLERANCE = 8


class Pacing:
    """Rates of one session in Mbit/s, None without a bound, and the connections that share them.

    Shares are set anew when the number of connections is an eighth off that which they are for: so all of them together
    have an eighth more than the rate at most, and a connection costs the same however many there are.
    """

    def __init__(self, mbit_up: int | None, mbit_down: int | None) -> None:
        self._rates = mbit_up, mbit_down
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._sharing = 1

    def limit(self, mbit_up: int | None, mbit_down: int | None) -> None:
        """Change the rates, for open connections as well."""
        before, self._rates = self._rates, (mbit_up, mbit_down)
        if before != self._rates:
            self._share()

    def add(self, client: socket.socket, server: socket.socket) -> None:
        """Let a connection have its share: of what comes down to `client`, and of what goes up to `server`."""
        self._pairs.add((client, server))
        if not self._note_number():
            self._set(client, server)

    def remove(self, client: socket.socket, server: socket.socket) -> None:
        """Give the share of a connection to the others."""
        self._pairs.discard((client, server))
        self._note_number()

    def _note_number(self) -> bool:
        """Set all shares if the number of connections is too far off the one they are for; tell whether it is."""
        if self._rates == (None, None) or abs(len(self._pairs) - self._sharing) * _TOLERANCE <= self._sharing:
            return False
        self._share()
        return True

    def _share(self) -> None:
        self._sharing = max(1, len(self._pairs))
        for client, server in self._pairs:
            self._set(client, server, is_anew=True)

    def _set(self, client: socket.socket, server: socket.socket, *, is_anew: bool = False) -> None:
        for sock, mbit in ((server, self._rates[0]), (client, self._rates[1])):
            if mbit is not None:
                _set_rate(sock, max(1, mbit * _BYTES_OF_MBIT // self._sharing))
            elif is_anew:
                _set_rate(sock, _UNLIMITED)


def _set_rate(sock: socket.socket, rate: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", rate))
