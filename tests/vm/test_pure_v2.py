"""Claims that only a pure cgroup v2 kernel, or one with project quotas, can prove: on an emulated machine the
attacks of our catalogue that a kernel answers, and on another the tests with the marks of the two.

One file holds both, so that they run one after the other: two emulated machines are too much for two processors.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest

from sandkasten.security.campaign import catalogue
from sandkasten.security.probes.inside import INSIDE
from tests.vm import machine
from tests.vm.words import boot_or_skip, statuses, trouble

pytestmark = pytest.mark.vm

PATIENCE = 30
"""Factor by which an attempt may take longer than usual: the processor is emulated."""

COUNTED = ("exhaustion", "memory", "quotas")
"""Classes that use up what the kernel counts by cgroup, by project or by user."""

KERNELS = {each.group for each in INSIDE} | set(COUNTED)
"""Classes in which the kernel answers a process of a session. In the others our own code does, the same on every kernel
(names and bytes for the daemon's parsers, paths for those who serve files, results of shells): these attempts are made
on this machine's kernel alone, as an emulated processor takes as long for them as for the rest.
"""

ATTACK = """
attack() {{
    sandkasten security --attack --data-dir "/data/attack-$WORKER" --patience {patience} "$@"
    echo "attack: exit status $?"
}}
case $WORKER in
1) attack --user sandbox {others} ;;
2) attack --user root {others}; attack --user sandbox {memory} ;;
esac
"""
"""Filling memory takes longest, and only the sandbox's user does it; the judge is the machine's free memory, so it
comes last.
"""
CAMPAIGNS = 3


def _only(groups: Collection[str]) -> str:
    return " ".join(f"--only {each}." for each in sorted(groups))


def test_every_attack_is_held_off_on_a_pure_v2_kernel() -> None:
    """No attempt that the kernel answers is BROKEN or left out, as the sandbox's user and as root inside."""
    others, memory = _only(KERNELS - {"memory"}), _only(["memory"])
    printed = boot_or_skip(ATTACK.format(patience=PATIENCE, others=others, memory=memory))
    summaries = re.findall(r"^(\d+) attempts in \S+ s: (.*)$", printed, re.MULTILINE)
    assert len(summaries) == CAMPAIGNS, trouble(printed)
    assert not any("BROKEN" in verdicts for _, verdicts in summaries), trouble(printed)
    wanted = sum(len(each.users) for each in catalogue() if each.group in KERNELS)
    assert sum(int(made) for made, _ in summaries) == wanted
    assert sum(int(count) for _, verdicts in summaries for count in re.findall(r"(\d+) held", verdicts)) >= 60
    assert statuses(printed, "attack") == ["0"] * CAMPAIGNS


def test_claims_of_cgroup_v2_and_of_project_quotas_hold() -> None:
    """Every test with one of the marks passes there, a session through a daemon among them, and none is skipped."""
    printed = boot_or_skip(f'{machine.marked_tests("cgroup_v2", "project_quota")}\necho "tests: exit status $?"')
    assert re.search(r"guest: \S+, controllers .*\bcpu\b.*\bmemory\b.*\bpids\b", printed, re.MULTILINE)
    assert "guest: project quota prjquota" in printed
    summaries = re.findall(r"^(\d+) passed, \d+ deselected in .*$", printed, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, f"a summary is missing, or has failures or skips:\n{trouble(printed)}"
    assert sum(map(int, summaries)) >= 60
    assert statuses(printed, "tests") == ["0"] * machine.PROCESSORS
