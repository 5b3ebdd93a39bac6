"""The egress client over an nsinit that refuses: what a caller is told."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import trio

from nsinit.wire.protocol import NETWORK_STAGE
from sandkasten.actors.core import Actor, Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.egress import EgressClient, OpenWay
from sandkasten.config import EgressSettings
from sandkasten.counters.metrics import Metrics
from sandkasten.journal.egress import EgressLogs
from sandkasten.journal.ring import Journal
from sandkasten.links.nsinit import ChildProcess, Role
from sandkasten.model.errors import BuildFailed, NetworkNotSupported, SandkastenError
from sandkasten.model.network import Network, NetworkMode


class RefusingNsinit(Actor):
    """An nsinit whose every request fails at one step."""

    def __init__(self, ref: Ref, failure: BuildFailed) -> None:
        super().__init__(ref)
        self._failure = failure

    async def handle(self, message: Any) -> Any:
        raise self._failure


async def _never(role: Role = "egress") -> ChildProcess:
    raise AssertionError("no process is started for a session that has no sockets")


@pytest.mark.parametrize(
    ("stage", "number", "told"),
    [
        ("program", errno.EINVAL, NetworkNotSupported),
        ("link", errno.EPERM, NetworkNotSupported),
        ("map", errno.ENOMEM, BuildFailed),
        ("sockets", errno.EADDRINUSE, BuildFailed),
    ],
)
async def test_a_kernel_that_cannot_steer_is_told_from_a_failure(
    stage: str, number: int, told: type[SandkastenError]
) -> None:
    """The one will never do on this node; the other may pass."""
    failure = BuildFailed("failed", stage=f"{NETWORK_STAGE}{stage}", path="", errno=number)
    nsinit = RefusingNsinit(Ref("nsinit"), failure)
    client = EgressClient(
        Ref("egress"),
        nsinit=nsinit.ref,
        settings=EgressSettings(),
        directory=SessionDirectory(),
        logs=EgressLogs(),
        journal=Journal(),
        metrics=Metrics(),
        start=_never,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(nsinit.run)
        await nursery.start(client.run)
        with pytest.raises(SandkastenError) as refused:
            await client.ref.ask(OpenWay("0" * 24, Network(NetworkMode.OPEN)))
        assert refused.type is told
        nursery.cancel_scope.cancel()
