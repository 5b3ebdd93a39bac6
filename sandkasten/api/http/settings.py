"""Settings of the HTTP front. Frozen values with defaults; knows no file, no environment, no socket."""

from __future__ import annotations

from pathlib import Path

import attrs

from sandkasten.model import Limits
from sandkasten.model.network import NetworkMode

MIB = 1024 * 1024


@attrs.frozen(kw_only=True)
class ApiSettings:
    """Sizes in bytes, durations in seconds unless the name says otherwise.

    `api_key` None: no key is asked for, and only loopback addresses and unix sockets are served.
    `allowed_origins`: web pages of other origins (`https://host[:port]`) that may open WebSockets, with the key.
    `default_limits` fills what a partial `limits` object leaves open, `default_network` is the mode of a `network`
    object that names none. `spool_dir` None: the system's temporary directory.
    """

    listen: tuple[str, ...] = ("127.0.0.1:8080",)
    api_key: str | None = attrs.field(default=None, repr=False)
    default_limits: Limits = attrs.field(factory=Limits)
    default_network: NetworkMode = NetworkMode.NONE
    max_exec_timeout_ms: int = 120_000
    allow_unlimited_exec: bool = False

    max_command_bytes: int = MIB
    max_json_bytes: int = 16 * MIB
    max_upload_bytes: int = 1024 * MIB
    max_import_bytes: int = 10 * 1024 * MIB
    max_read_bytes: int = 100 * MIB
    default_read_bytes: int = 10 * MIB
    max_header_bytes: int = 16 * 1024
    spool_dir: Path | None = None

    ping_interval_s: float = 15.0
    coalesce_ms: int = 15

    allowed_origins: tuple[str, ...] = ()
    max_message_bytes: int = MIB
    websocket_ping_s: float = 20.0
    websocket_auth_s: float = 10.0

    max_connections: int = 1000
    read_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 75.0
    graceful_timeout_s: float = 5.0

    @property
    def max_request_bytes(self) -> int:
        """The largest JSON body whose largest member is a command; `max_json_bytes` is for contents of files.

        Three times the command, since a character of two bytes may take six in JSON.
        """
        return min(self.max_json_bytes, 3 * self.max_command_bytes + MIB)
