"""Rules that the client adds to a session's network, beside others who change it at the same time."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from sandkasten import errors
from sandkasten.actors.session import changing
from sandkasten.sdk import SandboxClient
from tests.api.harness import KEY, running_front


async def test_rules_come_to_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of the network changes, and of several who add a rule at once none takes away another's."""

    async def put_nothing(*_arguments: Any) -> None:
        await trio.lowlevel.checkpoint()  # no way out is opened here: the claim is about requests

    monkeypatch.setattr(changing, "put_network", put_nothing)
    async with running_front() as running, SandboxClient(base_url=running.url, api_key=KEY) as client:
        session = await client.create_session()
        limits = {"connections": 5, "bytes_up": 7, "bytes_down": None, "mbit_up": 2, "mbit_down": None}
        network = {"mode": "ask", "limits": limits, "log": "denied", "proxy_env": True}
        await session.update(network={**network, "allow": ["a.example"], "deny": ["b.example"]})
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(lambda rule: session.add_rules(allow=[rule]), f"n{number}.example")
        info = await session.add_rules(allow=["a.example"], deny=["c.example:22"])
        allowed = info.network.pop("allow")
        assert info.network == {**network, "deny": ["b.example", "c.example:22"], "revision": 8}
        assert (allowed[0], sorted(allowed)) == ("a.example", ["a.example", *(f"n{each}.example" for each in range(5))])
        with pytest.raises(errors.InvalidRule):
            await session.add_rules(allow=["*"])
