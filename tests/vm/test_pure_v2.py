"""What only a pure cgroup v2 kernel can prove: limits, counting and events there, and that an older kernel works."""

from __future__ import annotations

import faulthandler
import re

import pytest

from tests import debian
from tests.vm import machine

TESTS = [
    "tests/kernel/test_cgroups.py",
    "tests/kernel/test_cgroups_groups.py",
    "tests/kernel/test_isolation_overlay.py",
]


@pytest.mark.vm
def test_cgroup_tests_pass_on_a_pure_v2_kernel() -> None:
    """The same tests as on this machine, where every controller is v2, all pass, and none was skipped."""
    faulthandler.cancel_dump_traceback_later()  # an emulated machine takes longer than any other test may
    try:
        output = machine.boot(TESTS)
    except debian.Unavailable as reason:
        pytest.skip(str(reason))
    print(output)
    assert re.search(r"guest: \S+, controllers .*\bcpu\b.*\bmemory\b.*\bpids\b", output, re.MULTILINE)
    summary = re.search(r"^(\d+) passed( in .*)?$", output, re.MULTILINE)
    assert summary is not None, "no summary, or one with failures or skips"
    assert int(summary[1]) >= 30
    assert "guest: exit status 0" in output
