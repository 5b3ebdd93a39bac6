"""What is installed and in force (`/v1/system`) and what this node has and uses (`/v1/node`), as JSON."""

from __future__ import annotations

from typing import Any

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.model.node import Machine, NodeInfo, System
from sandkasten.timestamps import rfc3339

_AMOUNTS = ("totals", "budget", "committed", "used", "free")


async def system(exchange: Exchange) -> Answer:
    """GET /v1/system"""
    return json_answer(system_view(await exchange.supervisor.system()))


async def node(exchange: Exchange) -> Answer:
    """GET /v1/node"""
    return json_answer(node_view(await exchange.supervisor.node()))


async def drain(exchange: Exchange) -> Answer:
    """POST /v1/node/drain"""
    return json_answer(node_view(await exchange.supervisor.drain()))


async def undrain(exchange: Exchange) -> Answer:
    """POST /v1/node/undrain"""
    return json_answer(node_view(await exchange.supervisor.undrain()))


def system_view(found: System) -> dict[str, Any]:  # JSON values
    """Return the installation as clients see it."""
    plain = ("version", "python", "kernel", "architecture", "cgroup_mode")
    return {
        **{name: getattr(found, name) for name in plain},
        "features": dict(found.features),
        "defaults": dict(found.defaults),
        "limits": dict(found.limits),
        "protections": [attrs.asdict(each) for each in found.protections],
        **machine_view(found.machine),
    }


def machine_view(machine: Machine) -> dict[str, Any]:  # JSON values
    """Return an examination as `doctor --json` and `/v1/system` have it."""
    return {
        "examined_at": rfc3339(machine.examined_at),
        "facts": dict(machine.facts),
        "checks": [attrs.asdict(check) for check in machine.checks],
    }


def node_view(found: NodeInfo) -> dict[str, Any]:  # JSON values
    """Return a node as clients see it."""
    return {
        "id": found.id,
        "incarnation": found.incarnation,
        "status": found.status,
        "time": rfc3339(found.time),
        "started_at": rfc3339(found.started_at),
        "capacity": {name: attrs.asdict(getattr(found, name)) for name in _AMOUNTS},
        "images": list(found.images),
        "sessions": dict(found.sessions),
        "vessels": found.vessels,
        "queued": found.queued,
    }
