"""Our own attacks, on a pure v2 kernel: `sandkasten security --attack` says there what it says here."""

from __future__ import annotations

import faulthandler
import re

import pytest

from tests import debian
from tests.vm import machine

PATIENCE = 30
"""How much longer than usual an attempt may take: the processor is emulated."""
ATTACK = f"""
user=sandbox; [ "$WORKER" = 1 ] || user=root
exec sandkasten security --attack --user $user --data-dir "/data/attack-$WORKER" --patience {PATIENCE}
"""


@pytest.mark.vm
def test_every_attack_is_held_off_on_a_pure_v2_kernel() -> None:
    """The whole catalogue, as the sandbox's user on one processor and as root inside on the other: none is BROKEN."""
    faulthandler.cancel_dump_traceback_later()
    try:
        output = machine.boot(ATTACK, workers=2)
    except debian.Unavailable as reason:
        pytest.skip(str(reason))
    print(output)
    summaries = re.findall(r"^\d+ attempts in \S+ s: (.*)$", output, re.MULTILINE)
    assert len(summaries) == 2
    assert not any("BROKEN" in each for each in summaries)
    assert sum(int(count) for each in summaries for count in re.findall(r"(\d+) held", each)) >= 60
    assert [f"guest: worker {number}: exit status 0" in output for number in (1, 2)] == [True, True]
