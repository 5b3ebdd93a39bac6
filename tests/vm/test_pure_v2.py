"""What only a pure cgroup v2 kernel can prove, in one machine: limits, counting and events there, that our own attacks
are held off there too, and that an older kernel works."""

from __future__ import annotations

import faulthandler
import re

import pytest

from tests import debian
from tests.vm import machine

pytestmark = pytest.mark.vm

PATIENCE = 30
"""How much longer than usual an attempt may take: the processor is emulated."""

ATTACK = f"""
user=sandbox; [ "$WORKER" = 1 ] || user=root
sandkasten security --attack --user $user --data-dir "/data/attack-$WORKER" --patience {PATIENCE}
echo "attack: exit status $?"
"""


@pytest.fixture(scope="module")
def printed() -> str:
    """What the machine printed in which every test with the mark ran, and then the whole catalogue of attacks."""
    faulthandler.cancel_dump_traceback_later()  # an emulated machine takes longer than any other test may
    files = machine.marked_files("cgroup_v2")
    assert "tests/e2e/test_full_session.py" in files
    tests = machine.marked_tests("cgroup_v2", files)
    try:
        output = machine.boot(f'{tests}\necho "tests: exit status $?"\n{ATTACK}', workers=machine.PROCESSORS)
    except debian.Unavailable as reason:
        pytest.skip(str(reason))
    print(output)
    return output


def trouble(printed: str) -> str:
    """Return the lines that say what failed, and the machine's last words."""
    failed = re.findall(r"^(?:FAILED|ERROR|E  |BROKEN|.*\bBROKEN\b).*$", printed, re.MULTILINE)
    return "\n".join([*failed[:60], "…", *printed.splitlines()[-30:]])


def statuses(printed: str, what: str) -> list[str]:
    """Return what `what` ended with on each processor."""
    return re.findall(rf"^{what}: exit status (\d+)$", printed, re.MULTILINE)


def test_what_is_claimed_of_cgroup_v2_holds_on_a_pure_v2_kernel(printed: str) -> None:
    """Every test with that mark, a whole session through a daemon among them, passes there, and none was skipped."""
    assert re.search(r"guest: \S+, controllers .*\bcpu\b.*\bmemory\b.*\bpids\b", printed, re.MULTILINE)
    assert "guest: project quota prjquota" in printed
    summaries = re.findall(r"^(\d+) passed, \d+ deselected in .*$", printed, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, f"a summary is missing, or has failures or skips:\n{trouble(printed)}"
    assert sum(map(int, summaries)) >= 50
    assert statuses(printed, "tests") == ["0"] * machine.PROCESSORS


def test_every_attack_is_held_off_on_a_pure_v2_kernel(printed: str) -> None:
    """The whole catalogue, as the sandbox's user on one processor and as root inside on the other: none is BROKEN."""
    summaries = re.findall(r"^\d+ attempts in \S+ s: (.*)$", printed, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, trouble(printed)
    assert not any("BROKEN" in each for each in summaries)
    assert sum(int(count) for each in summaries for count in re.findall(r"(\d+) held", each)) >= 60
    assert statuses(printed, "attack") == ["0"] * machine.PROCESSORS
