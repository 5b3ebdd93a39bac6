"""Claims that only a pure cgroup v2 kernel can prove, in one machine: limits, counting and events there, and that an
older kernel works. Attacks and disks have machines of their own.
"""

from __future__ import annotations

import re

import pytest

from tests.vm import machine
from tests.vm.words import boot_or_skip, statuses, trouble

pytestmark = pytest.mark.vm


def test_what_is_claimed_of_cgroup_v2_holds_on_a_pure_v2_kernel() -> None:
    """Every test with that mark, a whole session through a daemon among them, passes there, and none was skipped."""
    files = machine.marked_files("cgroup_v2")
    assert "tests/e2e/test_full_session.py" in files
    tests = machine.marked_tests("cgroup_v2", files)
    printed = boot_or_skip(f'{tests}\necho "tests: exit status $?"')
    assert re.search(r"guest: \S+, controllers .*\bcpu\b.*\bmemory\b.*\bpids\b", printed, re.MULTILINE)
    summaries = re.findall(r"^(\d+) passed, \d+ deselected in .*$", printed, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, f"a summary is missing, or has failures or skips:\n{trouble(printed)}"
    assert sum(map(int, summaries)) >= 50
    assert statuses(printed, "tests") == ["0"] * machine.PROCESSORS
