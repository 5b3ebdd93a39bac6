"""Protections: the checks that each is made of, and the missing ones that stop a start."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sandkasten.config import Config, IsolationSettings, SecuritySettings
from sandkasten.host.checks import CATALOGUE, fails, works
from sandkasten.host.protections import Situation, lacking, protections, with_needs
from sandkasten.model.node import PROTECTIONS, Check, Machine, Need, Protection, ProtectionState, Verdict


def machine(*bad: Check) -> Machine:
    """A machine on which everything works but for `bad`."""
    broken = {check.id for check in bad}
    good = [works(check_id, "done") for check_id in CATALOGUE if check_id not in broken]
    return Machine(datetime.now(UTC), [*good, *bad])


def found_on(some: Machine, config: Config | None = None) -> dict[str, Protection]:
    return {each.name: each for each in protections(Situation(config or Config(), some))}


def lacks_on(some: Machine, config: Config | None = None) -> list[str]:
    return lacking(config or Config(), tuple(found_on(some, config).values()))


def test_every_protection_that_is_always_needed_rests_on_a_check() -> None:
    """None of the protections is ever on without proof; and no check rests on nothing."""
    proven = {subject.protection for subject in CATALOGUE.values()} - {""}
    assert {name for name, need in PROTECTIONS.items() if need is not Need.OPTIONAL} <= proven <= set(PROTECTIONS)


def test_what_was_not_examined_counts_as_unproven() -> None:
    """No check at all is no reason to start."""
    nothing = Machine(datetime.now(UTC), [])
    assert {each.state for each in found_on(nothing).values() if each.required} == {ProtectionState.UNKNOWN}
    named = {line.split(" ")[0] for line in lacks_on(nothing)}
    assert named == {name for name, need in PROTECTIONS.items() if need is not Need.OPTIONAL}


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (Verdict.MISSING, ProtectionState.MISSING),
        (Verdict.NOT_TRIED, ProtectionState.UNKNOWN),
        (Verdict.FALLS_BACK, ProtectionState.DEGRADED),
    ],
)
def test_the_worst_check_says_how_it_is(verdict: Verdict, state: ProtectionState) -> None:
    """The fix comes with the state; a fall-back is no reason to stop, the others are."""
    some = machine(fails("proc", "it did not", verdict=verdict, fix="mend it"), works("overlay", "fine"))
    found = found_on(some)["filesystem"]
    assert (found.state, found.detail, found.fix, found.required) == (state, "proc: it did not", "mend it", True)
    lacks = lacks_on(some)
    assert len(lacks) == (0 if state is ProtectionState.DEGRADED else 1)
    assert all(line.startswith("filesystem is required and ") and line.endswith("; mend it") for line in lacks)


def test_what_is_promised_can_be_given_up_and_what_is_essential_can_not() -> None:
    """The sentence says how; `Config` refuses to give up the rest."""
    some = machine(fails("swap", "not counted"))
    (line,) = lacks_on(some)
    assert line.endswith("(or list swap in isolation.allow_missing)")
    assert lacks_on(some, Config(isolation=IsolationSettings(allow_missing=("swap",)))) == []
    with pytest.raises(ValueError, match="no sandbox can be made without limits"):
        IsolationSettings(allow_missing=("limits",))


def test_what_is_listed_as_required_must_be_fully_on() -> None:
    """A fallback is not enough for it, nor is what the configuration itself switches off."""
    config = Config(isolation=IsolationSettings(required=("filesystem",)))
    some = machine(fails("overlay", "half of it", verdict=Verdict.FALLS_BACK))
    assert lacks_on(some) == []
    (line,) = lacks_on(some, config)
    assert line.startswith("filesystem is required and not complete: overlayfs: half of it")
    off = Config(isolation=IsolationSettings(required=("seccomp",)), security=SecuritySettings(seccomp="off"))
    (line,) = lacks_on(machine(), off)
    assert line.startswith("seccomp is required and off: ")
    assert lacks_on(machine(), Config(security=SecuritySettings(seccomp="off"))) == []


def test_a_check_is_required_as_its_protection_is() -> None:
    """A check that matters to the operator alone never stops a start."""
    some = with_needs(Config(), machine(fails("swap", "no"), fails("bridge", "no"), fails("inotify", "few")))
    is_fatal = {check.id: check.is_fatal for check in some.checks}
    assert {check_id for check_id, fatal in is_fatal.items() if fatal} == {"swap"}
    waived = with_needs(Config(isolation=IsolationSettings(allow_missing=("swap",))), some)
    assert not any(check.is_fatal for check in waived.checks)
