"""The sandbox of a call: found by its label, made at first use, made anew after its end.

The newest protocol has no session, so no state may hang on one. A sandbox has a name, and the name is the label `mcp`
of a session. What is remembered here only saves the search: another process, or the same one after a restart, finds
the same sandbox. Without a name there is one for each API key, `default`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from sandkasten import errors
from sandkasten.sdk import SandboxClient, Session
from sandkasten.sdk.types import SessionInfo

DEFAULT = "default"
LABEL = "mcp"
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
NAME = re.compile(rf"{NAME_PATTERN}\Z")
MAX_REMEMBERED = 1000


class NoSandbox(Exception):
    """There is no such sandbox, and none may be made; the message is for the model."""


@dataclass
class Sandboxes:
    """The sandboxes within reach of one API key.

    `key_id`: the id of the key, or a guess until it has made a session. `may_make`: the key may make sessions. `image`:
    of new sandboxes; None is the server's default.
    """

    client: SandboxClient
    key_id: str
    may_make: bool = True
    image: str | None = None
    calls: int = 0
    """Calls of tools under way."""
    _found: dict[str, str] = field(default_factory=dict)

    async def find(self, name: str) -> SessionInfo | None:
        """Return the live sandbox of a name, of two the older; None if there is none. Raises `SandkastenError`."""
        found = None
        async for info in self.client.sessions(label=f"{LABEL}={name}"):  # the newest first
            if name != DEFAULT or info.key_id == self.key_id:
                found = info
        return found

    async def session(self, name: str, *, may_make: bool = True) -> tuple[Session, str]:
        """Return the sandbox of a name, made if there is none, and a note for the model: empty, or that it is new.

        Raises:
            NoSandbox: there is none, and none may be made.
            errors.SandkastenError: the server refuses.
        """
        if (known := self._found.get(name)) is not None:
            return Session(self.client, known), ""
        if (live := await self.find(name)) is not None:
            return self._remember(name, live.id), ""
        if not may_make:
            raise NoSandbox(f"there is no sandbox {name!r} yet; the first command makes it")
        ended = await self._last(name)
        session = await self._make(name, ended, self.image)
        if ended is None:
            return session, ""
        return session, f"[the sandbox {name!r} had ended ({ended.end_reason}); this is a new one: files are gone]"

    async def make(self, name: str, image: str | None) -> Session:
        """Make the sandbox of a name.

        Raises:
            NoSandbox: the key may make none, or the name is taken.
            errors.SandkastenError: the server refuses.
        """
        if await self.find(name) is not None:
            raise NoSandbox(f"there is a sandbox {name!r} already: use it, or end it first")
        return await self._make(name, await self._last(name), image or self.image)

    def forget(self, name: str) -> None:
        """Search for the sandbox at its next use: it has ended."""
        self._found.pop(name, None)

    async def all(self) -> Mapping[str, SessionInfo]:
        """Return the live sandboxes within reach by name; of two of one name the older. Raises as `find`."""
        found: dict[str, SessionInfo] = {}
        async for info in self.client.sessions(label=LABEL):
            name = info.labels[LABEL]
            if name != DEFAULT or info.key_id == self.key_id:
                found[name] = info  # the list begins with the newest
        return dict(sorted(found.items()))

    async def _last(self, name: str) -> SessionInfo | None:
        """Return the newest sandbox of a name that has ended."""
        async for info in self.client.sessions(label=f"{LABEL}={name}", status="all"):
            if info.end_reason is not None and (name != DEFAULT or info.key_id == self.key_id):
                return info
        return None

    async def _make(self, name: str, ended: SessionInfo | None, image: str | None) -> Session:
        if not self.may_make:
            raise NoSandbox(f"there is no sandbox {name!r}, and this API key may make none")
        # Calls of this key that come at once make one session, for they name the same one before it.
        token = f"mcp-{self.key_id}-{name}-{'first' if ended is None else ended.id}"
        create = partial(self.client.create_session, image=image, labels={LABEL: name})
        try:
            session = await create(idempotency_key=token)
        except errors.SessionExpired:  # it ended meanwhile, or this server calls the key by another id
            session = await create()
        info = await session.info()
        self.key_id = info.key_id or self.key_id
        older = await self.find(name)  # made at once by another key
        if older is not None and older.id != session.id:
            await session.destroy()
            return self._remember(name, older.id)
        return self._remember(name, session.id)

    def _remember(self, name: str, session_id: str) -> Session:
        if len(self._found) >= MAX_REMEMBERED:
            self._found.clear()
        self._found[name] = session_id
        return Session(self.client, session_id)
