"""Many sessions at once that work in workspaces while somebody kills; every confirmed byte must be there at the end.

A worker keeps one session and one workspace. It knows what it was promised (files, a shell variable) and checks it. A
session may end only because its PID 1 was killed; then the worker makes another on the same workspace. An error is
an honest answer to a kill if it says that the session is gone, that the work inside was interrupted, or that the same
request may work later; any other, and whatever claims to be a fault of the daemon, is a violation.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Sequence
from http import HTTPStatus

import attrs
import trio

from bench.soak.ledger import Ledger
from bench.soak.site import Answer, Client, Site, Unreachable

_GONE = frozenset({"SESSION_EXPIRED", "SESSION_NOT_FOUND"})
_KILLED = "WORK_INTERRUPTED"
"""The answer if the kill of a "shell" hit the process that worked on a file."""
_RETRY_S = 0.2
_CREATE_S = 120.0
_FILE_BYTES = 2000


class _Lost(Exception):
    """The session is gone."""


@attrs.define
class Member:
    """A worker's session and what it was promised of it. `mark` is what the shell's variable holds, None if unsure."""

    workspace: str
    chance: random.Random
    session: str = ""
    mark: str | None = None
    number: int = 0


class Crowd:
    """See the module's docstring."""

    def __init__(self, site: Site, ledger: Ledger, chance: random.Random, *, size: int) -> None:
        self._site, self._ledger = site, ledger
        self.members = [Member(f"soak-{number:03}", random.Random(chance.random())) for number in range(size)]
        self._opening = trio.CapacityLimiter(16)

    async def open_all(self) -> float:
        """Make every member's session; return how many seconds that took."""
        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            for member in self.members:
                nursery.start_soon(self._open_limited, member)
        return time.monotonic() - began

    async def _open_limited(self, member: Member) -> None:
        async with self._opening, self._site.client() as client:
            await self._open(client, member)
            await self._mark(client, member)

    async def work(self, pause_s: float) -> None:
        """Let all members work until cancelled, each with pauses of about `pause_s`."""
        async with trio.open_nursery() as nursery:
            for member in self.members:
                nursery.start_soon(self._work, member, pause_s)

    async def _work(self, member: Member, pause_s: float) -> None:
        async with self._site.client() as client:
            while True:
                await trio.sleep(member.chance.uniform(0, 2 * pause_s))
                try:
                    step = member.chance.choice((self._write, self._write_by_shell, self._read_back, self._mark))
                    await step(client, member)
                    self._ledger.count("steps")
                except _Lost:
                    self._ledger.count("sessions that ended")
                    member.mark = None
                    await self._open(client, member)
                except Unreachable:
                    self._ledger.count("answers that did not come")
                    member.mark = None
                    await trio.sleep(_RETRY_S)

    async def _open(self, client: Client, member: Member) -> None:
        member.mark, member.session = None, ""
        with trio.fail_after(_CREATE_S):
            while not member.session:
                try:
                    answer = await client.call("POST", "/v1/sessions", {"workspace_id": member.workspace})
                except Unreachable:
                    await trio.sleep(_RETRY_S)
                    continue
                if answer.is_ok:
                    member.session = answer.body["id"]
                    self._ledger.count("sessions made")
                else:
                    self._judge("create", answer)
                    await trio.sleep(_RETRY_S)

    async def _write(self, client: Client, member: Member) -> None:
        name, content = self._next_file(member)
        body = {"path": name, "content_base64": base64.b64encode(content).decode()}
        await self._ask(client, member, "fs/write", body)
        self._ledger.confirm(member.workspace, name, content)

    async def _write_by_shell(self, client: Client, member: Member) -> None:
        name, content = self._next_file(member)
        command = f"printf %s {content.decode()} > {name}.part && mv {name}.part {name}"
        answer = await self._exec(client, member, command)
        if answer.body["exit_code"] == 0:
            self._ledger.confirm(member.workspace, name, content)

    def _next_file(self, member: Member) -> tuple[str, bytes]:
        member.number += 1
        return f"file-{member.number}", member.chance.randbytes(_FILE_BYTES // 2).hex().encode()

    async def _read_back(self, client: Client, member: Member) -> None:
        files = self._ledger.files.get(member.workspace)
        if not files:
            return
        name = member.chance.choice(list(files))
        self._ledger.check(member.workspace, name, await self._read(client, member, name))

    async def _read(self, client: Client, member: Member, name: str) -> bytes | None:
        answer = await client.call("GET", f"/v1/sessions/{member.session}/fs/read?path={name}", None)
        if answer.code == "FILE_NOT_FOUND":
            return None
        self._require(member, "fs/read", answer)
        return base64.b64decode(answer.body["content_base64"])

    async def _mark(self, client: Client, member: Member) -> None:
        """Check that the exported variable is still there, whatever was killed but PID 1; then set another."""
        new = f"{member.chance.getrandbits(32)}"
        old, member.mark = member.mark, None
        answer = await self._exec(client, member, f"echo $MARK; export MARK={new}")
        said = answer.body["output"].strip()
        if answer.body.get("cause") == "exited":
            if old is not None and said != old:
                self._ledger.violate(f"session {member.session}: the variable was {old}, is {said!r}: {answer.body}")
            elif old is not None:
                self._ledger.count("shell states checked")
            member.mark = new

    async def _exec(self, client: Client, member: Member, command: str) -> Answer:
        return await self._ask(client, member, "exec", {"cmd": command, "timeout_ms": 60_000})

    async def _ask(self, client: Client, member: Member, route: str, body: object) -> Answer:
        answer = await client.call("POST", f"/v1/sessions/{member.session}/{route}", body)
        self._require(member, route, answer)
        return answer

    def _require(self, member: Member, what: str, answer: Answer) -> None:
        if answer.is_ok:
            return
        self._judge(what, answer)
        if answer.code in _GONE:
            raise _Lost
        raise Unreachable(answer.code)

    def _judge(self, what: str, answer: Answer) -> None:
        is_explained = answer.code in {*_GONE, _KILLED} or answer.body.get("retryable") is True
        if is_explained and answer.status != HTTPStatus.INTERNAL_SERVER_ERROR:  # a kill is no bug of the daemon's
            self._ledger.count(f"answered {answer.code}")
        else:
            self._ledger.violate(f"{what}: {answer.status} {answer.body}")

    # At rest --------------------------------------------------------------------------------------------------------

    async def count_answering(self, at_once: int = 16) -> int:
        """Return how many members' sessions answer with the shell state that they were promised."""
        limiter, good = trio.CapacityLimiter(at_once), 0

        async def ask(member: Member) -> None:
            nonlocal good
            async with limiter, self._site.client() as client:
                with trio.move_on_after(_CREATE_S):
                    while True:
                        try:
                            answer = await self._exec(client, member, "echo $MARK")
                        except _Lost:
                            return
                        except Unreachable:
                            await trio.sleep(_RETRY_S)
                            continue
                        good += answer.body["output"].strip() == member.mark
                        return

        async with trio.open_nursery() as nursery:
            for member in self.members:
                nursery.start_soon(ask, member)
        return good

    async def settle(self) -> None:
        """Give every member a session that lives, and a known shell state; the last kill may have come unnoticed."""
        async with trio.open_nursery() as nursery:
            for member in self.members:
                nursery.start_soon(self._settle_limited, member)

    async def _settle_limited(self, member: Member) -> None:
        async with self._opening, self._site.client() as client:
            with trio.fail_after(_CREATE_S):
                is_settled = False
                while not is_settled:
                    try:
                        await self._mark(client, member)
                        is_settled = member.mark is not None
                    except _Lost:
                        await self._open(client, member)
                    except Unreachable:
                        await trio.sleep(_RETRY_S)

    async def check_files(self) -> None:
        """Compare every confirmed file of every workspace with what is there; nobody kills meanwhile."""
        async with trio.open_nursery() as nursery:
            for member in self.members:
                nursery.start_soon(self._check_files, member)

    async def _check_files(self, member: Member) -> None:
        async with self._opening, self._site.client() as client:
            for name in list(self._ledger.files.get(member.workspace, ())):
                self._ledger.check(member.workspace, name, await self._read(client, member, name))

    async def close_all(self) -> None:
        """Destroy every session there is."""
        async with self._site.client() as client:
            sessions: Sequence[dict[str, str]] = (await client.call("GET", "/v1/sessions")).body
        limiter = trio.CapacityLimiter(16)

        async def destroy(session_id: str) -> None:
            async with limiter, self._site.client() as client:
                answer = await client.call("DELETE", f"/v1/sessions/{session_id}")
                if not answer.is_ok:
                    self._ledger.violate(f"destroy: {answer.status} {answer.body}")

        async with trio.open_nursery() as nursery:
            for session in sessions:
                nursery.start_soon(destroy, session["id"])
