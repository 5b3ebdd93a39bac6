"""Start guard: nsinit's report about the machine can still stop the start, before anybody can connect."""

from __future__ import annotations

import attrs
import pytest

from sandkasten.app import _guard
from sandkasten.config import Config, ConfigError, IsolationSettings
from sandkasten.host.protections import lacking
from sandkasten.model.node import Protection, ProtectionState, System
from tests.fakes.supervisor import FakeSupervisor

CONFIG = Config(isolation=IsolationSettings(required=("disk",)))


def supervisor_with(state: ProtectionState) -> FakeSupervisor:
    supervisor = FakeSupervisor()
    disk = Protection("disk", state, "as nsinit says", required=True, fix="mend it")
    supervisor.system_answer = attrs.evolve(supervisor.system_answer, protections=(disk,))
    return supervisor


async def test_a_required_protection_that_nsinit_lacks_stops_the_start() -> None:
    """The error names it and its fix; nothing is told as if it were in force."""
    told: list[System] = []
    with pytest.raises(ConfigError, match="disk is required and missing: as nsinit says; mend it"):
        await _guard(supervisor_with(ProtectionState.MISSING), CONFIG, told.append)
    assert told == []


async def test_what_is_in_force_is_told_once_it_is_known() -> None:
    """With everything that is required on, the start goes on."""
    told: list[System] = []
    supervisor = supervisor_with(ProtectionState.ON)
    await _guard(supervisor, CONFIG, told.append)
    assert told == [supervisor.system_answer]


def test_what_only_nsinit_knows_is_no_reason_to_refuse_before_it_has_spoken() -> None:
    """Untold before the start is fine, untold after it is not; the rest must be proven before."""
    disk = Protection("disk", ProtectionState.UNKNOWN, "not examined", required=True)
    overlay = Protection("filesystem", ProtectionState.UNKNOWN, "not examined", required=True)
    assert lacking(CONFIG, [disk], before_start=True) == []
    assert len(lacking(CONFIG, [disk])) == 1
    assert len(lacking(CONFIG, [disk, overlay], before_start=True)) == 1
