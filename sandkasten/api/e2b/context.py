"""A request of E2B's to a sandbox, as its handlers see it: the session, the user that is meant, places of files.

Also the labels of a session that say what E2B's API made of it. They are labels so that nothing below has to know them,
and that they are there after a restart.
"""

from __future__ import annotations

import base64
import binascii
import math
import posixpath
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import attrs
import trio

from sandkasten.api.e2b.connect import Code, ConnectError
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.resources.fields import file_path, spell_path
from sandkasten.errors import InvalidRequest
from sandkasten.model import Session
from sandkasten.supervisor import Supervisor

T = TypeVar("T")

PREFIX = "e2b."
TEMPLATE = "e2b.template"
"""Label with the template that was asked for. Who has it was made by E2B's API and has its account."""

AUTO_RESUME = "e2b.auto-resume"
"""Label of a sandbox that a request resumes when it is paused; others are gone for their clients then."""

KERNEL_PREFIX = "e2b-kernel-"
"""Beginning of the ids of processes that are contexts of the code interpreter, which clients see as such alone."""

USER = "user"
HOMES: Mapping[str, str] = {USER: "/home/user", "root": "/root"}
_MAX_PASSWD_BYTES = 1024 * 1024
_MAX_KEPT_BYTES = 16 * 1024 * 1024


@attrs.frozen
class Command:
    """A command as its client spelled it: a record of a run has only the beginning of its text."""

    cmd: str
    args: tuple[str, ...]
    envs: Mapping[str, str] = attrs.field(repr=False)
    cwd: str | None = None
    tag: str | None = None

    @property
    def size_bytes(self) -> int:
        """The memory that the texts take, about."""
        texts = (self.cmd, *self.args, *self.envs, *self.envs.values(), self.cwd or "", self.tag or "")
        return sum(len(text) for text in texts) + 200


class Commands:
    """The newest commands of all sandboxes, within bounded memory. Not kept over a restart: then the record serves."""

    def __init__(self, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._kept: OrderedDict[tuple[str, str], Command] = OrderedDict()
        self._free_bytes = max_bytes

    def keep(self, session_id: str, exec_id: str, command: Command) -> None:
        """Keep a command; the oldest go."""
        self._kept[session_id, exec_id] = command
        self._free_bytes -= command.size_bytes
        while self._free_bytes < 0:
            _, oldest = self._kept.popitem(last=False)
            self._free_bytes += oldest.size_bytes

    def get(self, session_id: str, exec_id: str) -> Command | None:
        """Return a command, None if it is not kept."""
        return self._kept.get((session_id, exec_id))


@attrs.frozen
class EnvdRequest:
    """A request to the services of one sandbox that lives. `asked_user` is the user in the request, if one is."""

    exchange: Exchange
    session: Session
    asked_user: str | None
    commands: Commands

    @property
    def supervisor(self) -> Supervisor:
        return self.exchange.supervisor

    @property
    def user(self) -> str | None:
        """The account that the request acts as; None is the session's own user, of a session made by our own API."""
        return self.asked_user or (USER if TEMPLATE in self.session.labels else None)

    async def home(self) -> str:
        """Return the directory where relative paths begin. Raises `InvalidRequest` for an unknown user."""
        user = self.user
        if user is None:
            return self.session.cwd
        if user in HOMES:
            return HOMES[user]
        async with self.exchange.files.open_read("/etc/passwd", max_bytes=_MAX_PASSWD_BYTES) as reader:
            content = b"".join([piece async for piece in reader])
        start = (b"\n" + content).find(b"\n" + user.encode("utf-8", "surrogateescape") + b":")  # passwd(5)
        if start >= 0:
            fields = content[start:].partition(b"\n")[0].decode("utf-8", "surrogateescape").split(":")
            return fields[5] if len(fields) == 7 and fields[5].startswith("/") else "/"
        raise InvalidRequest(f"there is no user {user[:64]!r}", username="is none of /etc/passwd")

    async def place(self, path: str) -> str:
        """Return the absolute path that a client means: relative to the user's home, which is `~` as well."""
        try:
            path = file_path(path)
        except ValueError as error:
            raise InvalidRequest("the path is none", path=str(error)) from None
        if path.startswith("/"):
            return path
        if path == "~" or path.startswith("~/"):
            path = path[2:]
        return (posixpath.join(await self.home(), path).rstrip("/") or "/") if path != "." else await self.home()

    @property
    def timeout_s(self) -> float | None:
        """The client's deadline for this request, None without one, as with 0. Raises `InvalidRequest`."""
        text = self.exchange.header(b"connect-timeout-ms")
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 10):  # Connect protocol, "Timeouts"
            raise InvalidRequest("the deadline is none", connect_timeout_ms="must be up to 10 digits")
        return int(text) / 1000 or None

    async def in_time(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work within the client's deadline. Raises `ConnectError` after that."""
        timeout_s = self.timeout_s
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            return await work()
        raise ConnectError(Code.DEADLINE_EXCEEDED, "the deadline of the request has passed")


def user_of(authorization: str | None) -> str | None:
    """Return the user that a Basic header names; it has no password and proves nothing. None for any other header."""
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")[0]
    except (binascii.Error, ValueError):
        raise InvalidRequest("the user can't be read", authorization="must be Basic, with a user's name") from None
    return name or None


def shown(path: str) -> str:
    """Return a path as clients see it."""
    return spell_path(path)
