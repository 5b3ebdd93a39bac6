"""The protections in force, drawn from the machine's checks, the configuration and nsinit's features.

The one source for `doctor`, the start messages, `/v1/system` and the refusal to start. Pure. Each name of
`model.node.PROTECTIONS` has an entry; most rest on their checks alone, the others have a function in `_ENTRIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from sandkasten.config import Config
from sandkasten.model.node import PROTECTIONS, Check, Machine, Need, Protection, ProtectionState, Verdict

_WORST_FIRST = (Verdict.MISSING, Verdict.NOT_TRIED, Verdict.FALLS_BACK, Verdict.WORKS)
_STATES = {
    Verdict.MISSING: ProtectionState.MISSING,
    Verdict.NOT_TRIED: ProtectionState.UNKNOWN,
    Verdict.FALLS_BACK: ProtectionState.DEGRADED,
    Verdict.WORKS: ProtectionState.ON,
}


@attrs.frozen
class Situation:
    """Knowledge at one moment. `features` are those that nsinit reported, empty before its start; `daemon_uid` is that
    of the running daemon, None before there is one.
    """

    config: Config
    machine: Machine
    features: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values
    daemon_uid: int | None = None


Entry = Callable[[Situation, Protection], Protection]
"""Takes the protection as the checks alone say, and returns the one in force."""


def _seccomp(now: Situation, found: Protection) -> Protection:
    profile = now.config.security.seccomp
    if profile == "off":
        return attrs.evolve(found, state=ProtectionState.OFF, detail="security.seccomp is off", fix="")
    if found.state is ProtectionState.ON and profile == "mvp":
        return attrs.evolve(
            found, state=ProtectionState.DEGRADED, detail="security.seccomp is mvp: only what it lists is refused"
        )
    return found


def _landlock(now: Situation, found: Protection) -> Protection:
    """Landlock, as nsinit asked the kernel for it; before nsinit runs, as the checks say."""
    if "landlock_scopes" not in now.features:
        return found
    if now.features["landlock_scopes"]:
        detail = "signals and abstract sockets stay inside; file rules by session"
        return attrs.evolve(found, state=ProtectionState.ON, detail=detail)
    if now.features.get("landlock_files"):
        detail = "file rules by session only: signals and abstract sockets can't be kept inside before Linux 6.12"
        return attrs.evolve(found, state=ProtectionState.DEGRADED, detail=detail)
    return attrs.evolve(
        found, state=ProtectionState.MISSING, detail="this kernel has neither scopes nor whole file rules"
    )


_DISK_MODES = {
    "project": "a project quota for each session",
    "btrfs": "a subvolume with a quota for each session",
    "loop": "an ext4 image behind a loop device for each session",
    "tmpfs": "a disk in memory for each session",
}


def _disk(now: Situation, found: Protection) -> Protection:
    """Disk limits, by the mechanism that nsinit chose at its start; before that, as the checks say."""
    if now.config.disk.mode == "none":
        return attrs.evolve(found, state=ProtectionState.OFF, detail="disk.mode is none")
    mode = now.features.get("disk")
    if mode is None:
        return found
    if mode == "none":
        refused = "; ".join(f"{name}: {why}" for name, why in now.features["disk_refused"].items())
        return attrs.evolve(found, state=ProtectionState.MISSING, detail=f"no mechanism works here ({refused})")
    return attrs.evolve(found, state=ProtectionState.ON, detail=_DISK_MODES[mode])


def _daemon_privilege(now: Situation, found: Protection) -> Protection:
    if now.daemon_uid:
        return attrs.evolve(
            found, state=ProtectionState.ON, detail=f"the daemon is user {now.daemon_uid}, without capabilities"
        )
    if now.config.user == "root":
        return attrs.evolve(found, state=ProtectionState.OFF, detail="user is root, and so is the daemon", fix="")
    if now.daemon_uid is None:
        return attrs.evolve(
            found,
            state=ProtectionState.ON,
            detail=f"`serve` gives root away once it has begun (user: {now.config.user})",
        )
    return attrs.evolve(found, state=ProtectionState.MISSING, detail="the program that embeds the supervisor is root")


def _own_filters(now: Situation, found: Protection) -> Protection:
    """The filters of our own processes. A daemon that is root has none, since nsinit, its child, would inherit it."""
    if not now.config.security.own_filters:
        return attrs.evolve(found, state=ProtectionState.OFF, detail="security.own_filters is off", fix="")
    if now.daemon_uid == 0 or now.config.user == "root":
        detail = "nsinit and its helpers make no other calls than theirs; a daemon that is root has no filter"
        return attrs.evolve(found, state=ProtectionState.DEGRADED, detail=detail)
    detail = "daemon, nsinit and its helpers make no other calls than theirs, the launcher none against the machine"
    return attrs.evolve(found, state=ProtectionState.ON, detail=detail)


_ENTRIES: Mapping[str, Entry] = {
    "seccomp": _seccomp,
    "landlock": _landlock,
    "disk": _disk,
    "daemon_privilege": _daemon_privilege,
    "own_filters": _own_filters,
}


_TOLD_BY_NSINIT = frozenset({"disk", "landlock"})
"""Protections that a start does not try itself: nsinit does, and refuses or reports."""


def protections(now: Situation) -> tuple[Protection, ...]:
    """Return every protection with its state."""
    found = ((name, _from_checks(now, name)) for name in PROTECTIONS)
    return tuple(_ENTRIES[name](now, each) if name in _ENTRIES else each for name, each in found)


def with_needs(config: Config, machine: Machine) -> Machine:
    """Return the machine with `required` of each check as the configuration has it."""
    checks = [
        attrs.evolve(check, required=is_required(config, check.protection)) if check.protection else check
        for check in machine.checks
    ]
    return attrs.evolve(machine, checks=checks)


def is_required(config: Config, name: str) -> bool:
    """Whether the daemon may not start without the protection."""
    if PROTECTIONS[name] is Need.ESSENTIAL or name in config.isolation.required:
        return True
    if name == "seccomp" and config.security.seccomp == "off":
        return False
    return PROTECTIONS[name] is Need.PROMISED and name not in config.isolation.allow_missing


def lacking(config: Config, found: Sequence[Protection], *, before_start: bool = False) -> list[str]:
    """Return one sentence for each protection that forbids the start; an empty list allows it.

    Protections that the configuration requires must be fully on; those required by default may be degraded.
    `before_start`: states that only nsinit can know are no reason yet.
    """
    sentences = []
    for each in found:
        if before_start and each.name in _TOLD_BY_NSINIT and each.state is ProtectionState.UNKNOWN:
            continue
        good = (
            {ProtectionState.ON}
            if each.name in config.isolation.required
            else {ProtectionState.ON, ProtectionState.DEGRADED}
        )
        if each.required and each.state not in good:
            sentences.append(_sentence(each))
    return sentences


def _sentence(lack: Protection) -> str:
    text = f"{lack.name} is required and {_WORDS[lack.state]}: {lack.detail}"
    if lack.fix:
        text += f"; {lack.fix}"
    if PROTECTIONS[lack.name] is Need.ESSENTIAL:
        return text
    if PROTECTIONS[lack.name] is Need.PROMISED:
        return f"{text} (or list {lack.name} in isolation.allow_missing)"
    return f"{text} (or take {lack.name} out of isolation.required)"


_WORDS = {
    ProtectionState.MISSING: "missing",
    ProtectionState.UNKNOWN: "unproven",
    ProtectionState.OFF: "off",
    ProtectionState.DEGRADED: "not complete",
}


def _checks_of(now: Situation, name: str) -> list[Check]:
    return [check for check in now.machine.checks if check.protection == name]


def _from_checks(now: Situation, name: str) -> Protection:
    """Return a protection in the state of its worst checks."""
    required = is_required(now.config, name)
    checks = _checks_of(now, name)
    if not checks:
        return Protection(name, ProtectionState.UNKNOWN, "not examined", required)
    worst = min(checks, key=lambda check: _WORST_FIRST.index(check.verdict))
    if worst.verdict is Verdict.WORKS:
        return Protection(name, ProtectionState.ON, "; ".join(check.seen for check in checks), required)
    bad = [check for check in checks if check.verdict is worst.verdict]
    fixes = dict.fromkeys(check.fix for check in bad if check.fix)
    detail = "; ".join(f"{check.title}: {check.seen}" for check in bad)
    return Protection(name, _STATES[worst.verdict], detail, required, "; ".join(fixes))
