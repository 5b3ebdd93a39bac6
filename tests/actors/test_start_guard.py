"""Start guard: nsinit's report about the machine can still stop the start, before anybody can connect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio

from sandkasten.config import Config, ConfigError, IsolationSettings, ServerSettings
from sandkasten.host.protections import lacking
from sandkasten.model.node import Protection, ProtectionState, System
from tests.fakes.nsinit import FakeNsinit
from tests.fakes.tree import open_scripted

REQUIRED = IsolationSettings(required=("disk",))
CONFIG = Config(isolation=REQUIRED)


async def test_a_required_protection_that_nsinit_lacks_stops_the_start(tmp_path: Path) -> None:
    """The error names it; nothing is told as if it were in force."""
    told: list[System] = []
    config = Config(data_dir=tmp_path / "data", isolation=REQUIRED, server=ServerSettings(pool_sandboxes=0))
    lack = re.escape("disk is required and missing: no mechanism works here (project: no quota here)")
    async with trio.open_nursery() as nursery:
        nsinit = FakeNsinit(config.data_dir, {}, nursery)
        nsinit.disk_refused = {"project": "no quota here"}
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=lack), flatten_subgroups=True):
            async with open_scripted(config, nsinit=nsinit, told=told.append):
                pytest.fail("the tree runs")
        nursery.cancel_scope.cancel()
    assert told == []


async def test_what_is_in_force_is_told_once_it_is_known() -> None:
    """With everything that is required on, the start goes on."""
    told: list[System] = []
    async with open_scripted(isolation=REQUIRED, told=told.append) as tree:
        assert told == [await tree.supervisor.system()]


def test_what_only_nsinit_knows_is_no_reason_to_refuse_before_it_has_spoken() -> None:
    """Untold before the start is fine, untold after it is not; the rest must be proven before."""
    disk = Protection("disk", ProtectionState.UNKNOWN, "not examined", required=True)
    overlay = Protection("filesystem", ProtectionState.UNKNOWN, "not examined", required=True)
    assert lacking(CONFIG, [disk], before_start=True) == []
    assert len(lacking(CONFIG, [disk])) == 1
    assert len(lacking(CONFIG, [disk, overlay], before_start=True)) == 1


def test_what_lacks_is_named_with_its_fix() -> None:
    """In one line."""
    disk = Protection("disk", ProtectionState.MISSING, "as nsinit says", required=True, fix="mend it")
    (line,) = lacking(CONFIG, [disk])
    assert line.startswith("disk is required and missing: as nsinit says; mend it ")
