"""What only a pure cgroup v2 kernel can prove: limits, counting and events there, and that an older kernel works."""

from __future__ import annotations

import faulthandler
import re

import pytest

from tests import debian
from tests.vm import machine


@pytest.mark.vm
def test_what_is_claimed_of_cgroup_v2_holds_on_a_pure_v2_kernel() -> None:
    """Every test with that mark, a whole session through a daemon among them, passes there, and none was skipped."""
    faulthandler.cancel_dump_traceback_later()  # an emulated machine takes longer than any other test may
    files = machine.marked_files("cgroup_v2")
    assert "tests/e2e/test_full_session.py" in files
    try:
        output = machine.boot_tests("cgroup_v2", files)
    except debian.Unavailable as reason:
        pytest.skip(str(reason))
    print(output)
    assert re.search(r"guest: \S+, controllers .*\bcpu\b.*\bmemory\b.*\bpids\b", output, re.MULTILINE)
    assert "guest: project quota prjquota" in output
    summaries = re.findall(r"^(\d+) passed, \d+ deselected in .*$", output, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, "a summary is missing, or has failures or skips"
    assert sum(map(int, summaries)) >= 50
    statuses = re.findall(r"^guest: worker \d+: exit status (\d+)$", output, re.MULTILINE)
    assert statuses == ["0"] * machine.PROCESSORS
