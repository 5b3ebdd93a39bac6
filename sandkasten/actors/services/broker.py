"""The broker client: owner of the process that has the secrets (`egress/broker.py`), and the way of a secret to it.

A value passes through on its way to the broker and is not kept. Nor are names: each question is asked there. The broker
starts with the first one. The egress client is given a socket to each broker, and asks for the next one when that ends.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, assert_never

import attrs
import trio

from egress import brokering
from egress.brokering import SecretFacts
from sandkasten import logcontext
from sandkasten.actors.core import Actor, Ask, Ref
from sandkasten.admission.secrets import NO_SECRETS, SecretTexts
from sandkasten.errors import EgressUnavailable, InvalidRequest, SecretNotFound, SecretsOff
from sandkasten.links.broker import BrokerLink
from sandkasten.links.fds import OwnedFd, wait_ended
from sandkasten.links.processes import STOP_S, ChildProcess, StartEgress, keep_running
from sandkasten.model.network import Network, NewSecret

log = logging.getLogger(__name__)

A = TypeVar("A")

_LIBRARY = "cryptography"
_ANSWER_S = 30.0
"""Deadline for an answer, the start of a broker included."""


@attrs.frozen
class KeepSecret(Ask[None]):
    """Have the broker keep a secret, in place of one of that name. Raises `InvalidRequest`, `Capacity`, `StoreFailed`,
    and as `FindSecrets`."""

    secret: NewSecret


@attrs.frozen
class ForgetSecret(Ask[None]):
    """Have the broker forget a secret. Raises `StoreFailed`, and as `FindSecrets`."""

    name: str


@attrs.frozen
class AskSecrets(Ask[Sequence[SecretFacts]]):
    """Ask for all secrets, without their values. Raises as `FindSecrets`."""


@attrs.frozen
class FindSecrets(Ask[SecretTexts]):
    """Ask for what a session needs of the secrets with these names.

    Raises:
        SecretNotFound: there is none of one of the names.
        SecretsOff: the node has no broker.
        EgressUnavailable: the broker does not answer.
    """

    names: Sequence[str]


@attrs.frozen
class BrokerSocket:
    """A socket to a broker, which the asker owns; `ended` is set when that broker is gone."""

    fd: OwnedFd
    ended: trio.Event


@attrs.frozen
class ConnectEgress(Ask[BrokerSocket]):
    """Ask for a socket for the egress process. Raises as `FindSecrets`."""


Message = KeepSecret | ForgetSecret | AskSecrets | FindSecrets | ConnectEgress


class BrokerClient(Actor):
    """See the module's docstring. Without `start` the node has no way to a broker."""

    def __init__(
        self, ref: Ref, *, data_dir: Path, ca_file: Path | None, key: bytes, start: StartEgress | None
    ) -> None:
        super().__init__(ref)
        self._words = [f"data={data_dir}", *([] if ca_file is None else [f"ca={ca_file}"])]
        self._key, self._start = key, start
        self._is_wanted = trio.Event()
        self._is_ready = trio.Event()
        self._link: BrokerLink | None = None
        self._ended = trio.Event()
        self._process: ChildProcess | None = None

    async def on_start(self) -> None:
        """Begin to look after the process."""
        logcontext.origin.set(logcontext.NOBODY)  # what happens to the process is no session's doing
        self._nursery.start_soon(self._keep_process)

    async def handle(self, message: Message) -> Any:  # each message names its answer
        match message:
            case KeepSecret(secret):
                return self.defer(self._put, secret)
            case ForgetSecret(name):
                return self.defer(self._request, brokering.DropSecret(0, name), brokering.BrokerDone)
            case AskSecrets():
                return self.defer(self._list)
            case FindSecrets(names):
                return self.defer(self._find, names)
            case ConnectEgress():
                return self.defer(self._connect)
            case _:
                assert_never(message)

    async def on_stop(self) -> None:
        if self._process is not None:
            await self._process.end("broker", STOP_S)

    async def _put(self, secret: NewSecret) -> None:
        said = secret.name, secret.value, tuple(secret.hosts), secret.placeholder
        if problem := brokering.secret_problem(*said):
            raise InvalidRequest("this can't be a secret", **dict([problem]))
        await self._request(brokering.PutSecret(0, *said), brokering.BrokerDone)

    async def _list(self) -> Sequence[SecretFacts]:
        return (await self._texts()).facts

    async def _find(self, names: Sequence[str]) -> SecretTexts:
        texts = await self._texts()
        found = {facts.name: facts for facts in texts.facts}
        for name in names:
            if name not in found:
                raise SecretNotFound("there is no such secret", secret=name)
        return attrs.evolve(texts, facts=tuple(found[name] for name in names))

    async def _texts(self) -> SecretTexts:
        facts: list[SecretFacts] = []
        while True:
            after = facts[-1].name if facts else ""
            page = await self._request(brokering.ListSecrets(0, after), brokering.SecretsListed)
            facts += page.secrets
            if page.is_last or not page.secrets:
                return SecretTexts(tuple(facts), page.certificate, self._key)

    async def _connect(self) -> BrokerSocket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            await self._request(brokering.JoinEgress(0), brokering.BrokerDone, [theirs.fileno()])
            return BrokerSocket(OwnedFd(ours.detach()), self._ended)

    async def _request(self, request: brokering.BrokerRequest, answer: type[A], fds: Sequence[int] = ()) -> A:
        if self._start is None:
            raise SecretsOff("this daemon has no way to start a broker")
        if find_spec(_LIBRARY) is None:
            raise SecretsOff("secrets need an extra: pip install 'sandkasten-runtime[secrets]'", extra="secrets")
        self._is_wanted.set()
        with trio.move_on_after(_ANSWER_S):
            await self._is_ready.wait()
            assert self._link is not None
            return await self._link.request(request, answer, fds)
        raise EgressUnavailable("the broker of secrets does not answer, or can't be started")

    # The process ------------------------------------------------------------------------------------------------

    async def _keep_process(self) -> None:
        await self._is_wanted.wait()
        await keep_running("broker", self._run_process)

    async def _run_process(self) -> None:
        """Start a broker and serve it to its end."""
        assert self._start is not None
        process = self._process = await self._start("broker", None, *self._words)
        assert process.pidfd is not None, "a broker is nobody's service apart"
        try:
            async with process.forwarding_log("broker"):
                self._link = BrokerLink(process.sock)
                self._is_ready.set()
                await wait_ended(process.pidfd)
        finally:
            self._link, self._process = None, None
            self._is_ready = trio.Event()
            self._ended.set()
            self._ended = trio.Event()
            with trio.CancelScope(shield=True):
                await process.end("broker", STOP_S)
        log.warning("broker_ended")


async def find_secrets(broker: Ref, network: Network) -> SecretTexts:
    """Return what a session with this network needs of its secrets. Raises as `FindSecrets`."""
    return await broker.ask_again(FindSecrets(network.secrets)) if network.secrets else NO_SECRETS
