"""The whole catalogue of our own attacks on a pure cgroup v2 and older kernel, from the sandbox's user and from root
inside."""

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
