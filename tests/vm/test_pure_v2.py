"""Claims that only a pure cgroup v2 kernel, one with project quotas, or systemd can prove: on an emulated machine the
whole catalogue of our attacks, on another the tests with the marks of the first two, and on a third the units.

One file holds them all, so that they run one after the other: two emulated machines are too much for two processors.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest

from sandkasten.security.campaign import catalogue
from sandkasten.security.probes.attempt import Attempt
from tests.vm import machine
from tests.vm.units import CLAIMS
from tests.vm.words import boot_or_skip, statuses, trouble

pytestmark = pytest.mark.vm

PATIENCE = 30
"""Factor by which an attempt may take longer than usual: the processor is emulated."""

ATTACK = """
echo '127.0.0.1 localhost' >/etc/hosts # Debian's installer writes it, no package does
user=sandbox; classes='{as_sandbox}'; [ "$WORKER" = 1 ] || {{ user=root; classes='{as_root}'; }}
mkdir -m 700 "/data/attack-$WORKER"
sandkasten security --attack --user $user --data-dir "/data/attack-$WORKER" --patience {patience} $classes
echo "attack: exit status $?"
"""


def _only(beginnings: Collection[str]) -> str:
    return " ".join(f"--only {each}" for each in sorted(beginnings))


LEFT_OUT = "results"
"""Class that is left out: hundreds of commands, 158 s of the 900 that the stage may take; with it 549 s are used."""

NOT_HERE = {"egress.node", "bridge.reach", "bridge.undo", "bridge.taken-over"}
"""Attempts that are not applicable: the machine has no address but its loopback, and no bridge is allowed."""


def _attack() -> str:
    """Return the script of the attempts: as the sandbox's user on one processor, as root inside on the other, and there
    those without a user inside as well: filling memory, as the sandbox's user, takes longest.
    """
    attempts = [each for each in catalogue() if _class(each) != LEFT_OUT]
    mixed = {_class(each) for each in attempts if "" in each.users}
    classes = {f"{_class(each)}." for each in attempts}
    of_user = {each.id if _class(each) in mixed else f"{_class(each)}." for each in attempts if "" not in each.users}
    return ATTACK.format(as_sandbox=_only(of_user), as_root=_only(classes), patience=PATIENCE)


def _class(attempt: Attempt) -> str:
    return attempt.id.partition(".")[0]


def test_every_attack_is_held_off_on_a_pure_v2_kernel() -> None:
    """No attempt is BROKEN or left out, as the sandbox's user on one processor and as root inside on the other."""
    printed = boot_or_skip(_attack())
    summaries = re.findall(r"^(\d+) attempts in \S+ s: (.*)$", printed, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, trouble(printed)
    assert not any("BROKEN" in verdicts for _, verdicts in summaries), trouble(printed)
    assert set(re.findall(r"^not applicable +(\S+)", printed, re.MULTILINE)) == NOT_HERE, trouble(printed)
    wanted = sum(len(each.users) for each in catalogue() if _class(each) != LEFT_OUT)
    assert sum(int(made) for made, _ in summaries) == wanted
    assert sum(int(count) for _, verdicts in summaries for count in re.findall(r"(\d+) held", verdicts)) >= 60
    assert statuses(printed, "attack") == ["0"] * machine.PROCESSORS


def test_claims_of_cgroup_v2_and_of_project_quotas_hold() -> None:
    """Every test with one of the marks passes there, a session through a daemon among them, and none is skipped."""
    printed = boot_or_skip(f'{machine.marked_tests("cgroup_v2", "project_quota")}\necho "tests: exit status $?"')
    assert re.search(r"guest: \S+, controllers .*\bcpu\b.*\bmemory\b.*\bpids\b", printed, re.MULTILINE)
    assert "guest: project quota prjquota" in printed
    summaries = re.findall(r"^(\d+) passed, \d+ deselected in .*$", printed, re.MULTILINE)
    assert len(summaries) == machine.PROCESSORS, f"a summary is missing, or has failures or skips:\n{trouble(printed)}"
    assert sum(map(int, summaries)) >= 60
    assert statuses(printed, "tests") == ["0"] * machine.PROCESSORS


def test_the_units_do_what_their_page_says() -> None:
    """From `install-service` to the end: fences, a session, and what each kill, restart and stop leaves alone."""
    printed = boot_or_skip("python3 -m tests.vm.units", is_systemd=True)
    assert re.findall(r"^claim: (\w+): held", printed, re.MULTILINE) == [each.__name__ for each in CLAIMS], printed
