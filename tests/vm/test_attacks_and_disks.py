"""What else is tried on the emulated machine, each with one of its own: the whole catalogue of our attacks, from the
sandbox's user and from root inside; and disk limits by project quotas, which few kernels are built with.

In one file, so that they come one after the other: two emulated machines are too much for two processors.
"""

from __future__ import annotations

import re

import pytest

from tests.vm import machine
from tests.vm.words import boot_or_skip, statuses, trouble

pytestmark = pytest.mark.vm

PATIENCE = 30
"""How much longer than usual an attempt may take: the processor is emulated."""

ATTACK = f"""
user=sandbox; [ "$WORKER" = 1 ] || user=root
sandkasten security --attack --user $user --data-dir "/data/attack-$WORKER" --patience {PATIENCE}
echo "attack: exit status $?"
"""


def test_every_attack_is_held_off_on_a_pure_v2_kernel() -> None:
    """As the sandbox's user on one processor and as root inside on the other: none is BROKEN."""
    printed = boot_or_skip(ATTACK)
    summaries = re.findall(r"^\d+ attempts in \S+ s: (.*)$", printed, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, trouble(printed)
    assert not any("BROKEN" in each for each in summaries), trouble(printed)
    assert sum(int(count) for each in summaries for count in re.findall(r"(\d+) held", each)) >= 60
    assert statuses(printed, "attack") == ["0"] * machine.PROCESSORS


def test_project_quotas_hold_on_ext4_and_on_xfs() -> None:
    """Every test that needs them passes there, and none was skipped."""
    tests = machine.marked_tests("project_quota", machine.marked_files("project_quota"))
    printed = boot_or_skip(f'{tests}\necho "tests: exit status $?"')
    assert "guest: project quota prjquota" in printed
    summaries = re.findall(r"^(\d+) passed, \d+ deselected in .*$", printed, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, f"a summary is missing, or has failures or skips:\n{trouble(printed)}"
    assert sum(map(int, summaries)) >= 10
    assert statuses(printed, "tests") == ["0"] * machine.PROCESSORS
