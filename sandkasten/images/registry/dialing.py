"""Connections to addresses that may be dialled: a name is resolved once, each address is judged, and a connection goes
to the address that was judged.

A registry may send a client anywhere by a redirect, or by the name of its token server. What is special (private,
loopback, link-local, a cloud's metadata) is refused, but for hosts that the operator names.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Any

import httpcore2
import trio
from httpcore2 import AsyncNetworkBackend, AsyncNetworkStream

from egress.addresses import special_range

_CONNECT_S = 10.0


class AddressRefused(Exception):
    """An address that may not be dialled; the message names its range."""


def refusal(host: str) -> str | None:
    """Return why a host that is an address may not be dialled; None for a name, or an address that may."""
    try:
        return special_range(ipaddress.ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0]))
    except ValueError:
        return None


class CheckedBackend(AsyncNetworkBackend):
    """Connections for httpcore2. `is_trusted(host, port)`: the operator named the host; its address is not judged."""

    def __init__(self, is_trusted: Callable[[str, int], bool]) -> None:
        self._is_trusted = is_trusted
        self._own = httpcore2.TrioBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,  # as httpcore2 has them
    ) -> AsyncNetworkStream:
        """Connect to one of the addresses of a host.

        Raises:
            AddressRefused: an address of the host may not be dialled.
            httpcore2.ConnectError, httpcore2.ConnectTimeout.
        """
        with trio.move_on_after(_CONNECT_S if timeout is None else timeout):
            addresses = await self._resolve(host, port)
            failure: Exception = httpcore2.ConnectError(f"{host} has no address")
            for address in addresses:
                try:
                    return await self._own.connect_tcp(address, port, _CONNECT_S, local_address, socket_options)
                except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                    failure = error
            raise failure
        raise httpcore2.ConnectTimeout(f"no connection to {host} in time")

    async def _resolve(self, host: str, port: int) -> list[str]:
        try:
            found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore2.ConnectError(f"{host} can't be resolved: {error.strerror or error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not self._is_trusted(host, port):
            for address in addresses:
                if (reason := refusal(address)) is not None:
                    raise AddressRefused(f"{host}: {reason}")
        return addresses

    async def sleep(self, seconds: float) -> None:
        """Wait between tries of a connection."""
        await trio.sleep(seconds)
