"""The steps at which a process of nsinit's can be made to end (`steps.Crash`), by process and task.

Steps of a build come from the lists in `build`, so a new one is here by itself; the others are named at their place in
the code, and a test compares.
"""

from __future__ import annotations

from nsinit.sandbox.build import (
    BARE_STEPS,
    BIRTH_STEPS,
    BLANK_STEPS,
    CGROUP_STEPS,
    FILES_STEPS,
    IMAGE_STEPS,
    LAST_STEPS,
    POWER_STEPS,
)

MAKER_STEPS = ("raise limits", "group")
"""Steps of the cgroup maker, besides its part of a create."""

NSINIT_STEPS = ("slot", "listener", "cgroup", "clone", "limits", "identity", "share")
"""Steps of a create in nsinit itself."""

NSINIT_POINTS = (
    "nsinit.exec.group_made",
    "nsinit.exec.group_removed",
    "nsinit.destroy.abandoned",
    "nsinit.destroy.killed",
    "nsinit.destroy.emptied",
    "nsinit.destroy.cgroup_removed",
    "nsinit.destroy.discarded",
    "nsinit.workspace.directory_made",
    "nsinit.workspace.made",
    "nsinit.volume.formatted",
    "nsinit.volume.made",
    "nsinit.volume.enlarged",
    "nsinit.volume.grown",
    "nsinit.workspace.draft_synced",
    "nsinit.workspace.exchanged",
    "nsinit.workspace.published",
    "nsinit.workspace.renamed",
    "nsinit.workspace.discarded",
    "nsinit.layer.drafted",
    "nsinit.layer.unpacked",
    "nsinit.layer.named",
    "nsinit.layer.collected",
    "nsinit.image.published",
    "nsinit.image.retired",
)
RUNNER_POINTS = (
    "runner.create.set_up",
    "runner.exec.accepted",
    "runner.exec.started",
    "runner.exec.ended",
    "runner.exec.program_started",
    "runner.files.opened",
    "runner.files.received",
    "runner.files.placed",
)
"""Steps of PID 1 as the runner."""

NSINIT, BUILDER, FILES, INIT = "nsinit.create.", "builder.create.", "builder.files.", "init.create."
MAKER = "cgroup_maker."
"""Prefixes of the points. `FILES`: the builder's, of a sandbox that has a workspace and no program."""


def all_points() -> tuple[str, ...]:
    """Return every name, in the order of a session's life."""
    return (
        *point_names(NSINIT, NSINIT_STEPS),
        *point_names(MAKER, [*(name for name, _ in CGROUP_STEPS), *MAKER_STEPS]),
        *point_names(INIT, [name for name, _ in BIRTH_STEPS]),
        *point_names(BUILDER, [name for name, _ in (*BLANK_STEPS, *IMAGE_STEPS, *LAST_STEPS)]),
        *point_names(FILES, [name for name, _ in (*BARE_STEPS, *FILES_STEPS)]),
        *point_names(INIT, [name for name, _ in POWER_STEPS]),
        *RUNNER_POINTS,
        *NSINIT_POINTS,
    )


def point_names(prefix: str, steps: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Return the points of some steps; a step that occurs twice is one point."""
    return tuple(dict.fromkeys(prefix + step.replace(" ", "_") for step in steps))
