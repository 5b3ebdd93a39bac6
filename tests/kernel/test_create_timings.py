"""Timings of a create: its answer says how long each step took."""

from __future__ import annotations

import re

from nsinit.sandbox import build
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.api.resources.sessions import server_timing
from sandkasten.model import SessionSpec

_METRIC = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+;dur=\d+(\.\d+)?\Z")
"""W3C Server Timing §3, with the token of RFC 9110 §5.6.2."""


async def test_a_create_tells_its_phases_and_every_step_of_the_build(supervisor: LocalSupervisor) -> None:
    """The phases follow each other; no step takes longer than the build; as a header they are well-formed."""
    timings = (await supervisor.create(SessionSpec())).timings_ms
    phases = [name for name in timings if "." not in name]
    assert phases == ["queue", "store", "build", "runner"]
    steps = {name.removeprefix("build.") for name in timings} - set(phases)
    planned = (*build.BIRTH_STEPS, *build.BLANK_STEPS, *build.IMAGE_STEPS, *build.POWER_STEPS)
    assert steps >= {name for name, _ in planned}
    assert max(timings[f"build.{step}"] for step in steps) <= timings["build"]
    metrics = server_timing(timings).split(", ")
    assert len(metrics) == len(timings)
    assert [metric for metric in metrics if not _METRIC.match(metric)] == []
