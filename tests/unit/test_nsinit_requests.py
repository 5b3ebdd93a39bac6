"""The table of requests: every request of the protocol has a row, every field is checked before its use."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from nsinit.server.requests import STORE_TABLE, TABLE, Row
from nsinit.wire import protocol
from nsinit.wire.protocol import ANSWERS, DiskLimits, Limits, SandboxPlan
from nsinit.wire.validate import InvalidName

ID = "a" * 24
LIMITS, DISK = Limits(1 << 30, 100, 100_000), DiskLimits(1 << 30, 1000)
GOOD: dict[str, object] = {
    "session_id": ID,
    "workspace_id": "work",
    "name": "p-1",
    "limits": LIMITS,
    "disk": DISK,
    "quota": DISK,
    "size_bytes": 1 << 30,
    "plan": SandboxPlan(ID, "base", "host", LIMITS),
    "after": "",
    "allow": (protocol.BridgeRule("192.0.2.0/24", (53,)),),
    "deny": (),
    "leftover": protocol.Leftover("trash", "x"),
    "certificate": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
    "digest": f"sha256:{'a' * 64}",
    "layers": (f"sha256:{'a' * 64}",),
    "kept": (),
    "only": (f"sha256:{'a' * 64}",),
}
BAD: dict[str, object] = {
    "session_id": "../../etc",
    "workspace_id": "../x",
    "name": "a/b",
    "limits": Limits(1, 100, 100_000),
    "disk": DiskLimits(1, 1),
    "quota": DiskLimits(1, 1),
    "size_bytes": -1,
    "grace_ms": 10_001,
    "allow": (protocol.BridgeRule("192.0.2.1/24"),),
    "deny": (protocol.BridgeRule("192.0.2.1", (0,)),),
    "count": 17,
    "certificate": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\nand more\n",
    "plan": SandboxPlan("../x", "base", "host", LIMITS),
    "digest": f"sha256:{'a' * 63}/",
    "layers": (f"sha256:{'a' * 64}",) * 128,
    "kept": ("../x",),
    "only": ("",),
    "max_bytes": -1,
    "max_entries": 0,
    "base_layers": 128,
    "reserve_bytes": -1,
    "grace_s": -1,
}


def make(request: type, **changed: object) -> Any:
    """Return a good request, but for some fields."""
    values = {each.name: GOOD.get(each.name, 1) for each in fields(request)} | changed
    return request(**values)


def test_the_table_covers_every_request_but_those_that_only_come_first() -> None:
    """A request without a row would be refused, one that begins nsinit has no place in a running one."""
    first = {protocol.Start, protocol.OpenStore}
    assert set(TABLE) | first == set(protocol.REQUESTS.classes)
    assert not set(TABLE) & first
    assert {row.answer for row in TABLE.values()} <= set(ANSWERS.classes)


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.request.__name__)
def test_a_good_request_passes_and_each_bad_field_alone_does_not(row: Row[Any]) -> None:
    """Each value that is part of a path or goes to the kernel is checked; one that is only compared may be anything."""
    fds = range(row.fds)
    row.check(make(row.request), fds)
    with pytest.raises(InvalidName, match="descriptors"):
        row.check(make(row.request), [*fds, 3])
    for name in set(row.checks) & set(BAD):
        with pytest.raises(InvalidName):
            row.check(make(row.request, **{name: BAD[name]}), fds)
    assert set(row.checks) - set(BAD) <= {"after", "leftover"}


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.request.__name__)
def test_what_changes_a_session_or_a_workspace_waits_for_what_came_before(row: Row[Any]) -> None:
    """The key tells sessions from workspaces of the same name."""
    names = {each.name for each in fields(row.request)}
    if row.key is None:
        assert row.request.__name__.startswith(
            ("Ask", "Find", "List", "Scan", "RemoveLeftover", "CollectLayers", "Pack")
        )
    elif row.request in STORE_TABLE:
        assert str(row.key(make(row.request))).split()[0] in ("image", "layer")
    else:
        assert row.key(make(row.request)) == ("workspace work" if "workspace_id" in names else ID)


def test_a_field_that_nobody_checks_makes_no_row() -> None:
    """A new field must be given a check, or nsinit does not start."""
    row = TABLE[protocol.SetLimits]
    with pytest.raises(TypeError, match="limits"):
        Row(protocol.SetLimits, {"session_id": row.checks["session_id"]}, row.key, row.work)
