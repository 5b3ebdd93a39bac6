"""Trials of the disk mechanisms, which limit disk space. Each is tried as nsinit uses it, in a data directory made for
the trial.

Sources: see `nsinit/storage/`.
"""

from __future__ import annotations

from nsinit.kernel import constants as k
from nsinit.kernel import stage, syscalls
from nsinit.steps import StepFailed
from nsinit.storage import choose
from nsinit.storage.mechanism import Mechanism
from nsinit.storage.paths import Layout
from nsinit.tools.trials.attempt import FallsBack, Room, Seen, Trial


def best(room: Room) -> Seen:
    """Try the mechanisms in the order of a start of nsinit and tell the mode that the start would choose."""
    layout = _make_layout(room)
    mechanism, refused = choose.choose(layout, "auto", choose.candidates(layout, "auto"))
    if mechanism.mode == "none":
        raise OSError(0, "; ".join(f"{mode}: {reason}" for mode, reason in refused.items()))
    return Seen(f"mode {mechanism.mode}: a file was refused more than its disk holds", {"disk_mode": mechanism.mode})


def trials() -> dict[str, Trial]:
    """Return one trial for each mechanism, by the name of the check."""
    return {f"disk_{kind.mode}": _trial_of(kind) for kind in choose.KINDS}


def _trial_of(kind: type[Mechanism]) -> Trial:
    def trial(room: Room) -> str:
        layout = _make_layout(room)
        try:
            choose.choose(layout, kind.mode, [kind(layout)])
        except StepFailed as error:
            raise FallsBack(str(error).partition("can't be had here: ")[2] or str(error)) from error
        return "a file was refused more than its disk holds"

    return trial


def _make_layout(room: Room) -> Layout:
    layout = Layout(f"{room.directory}/disks")
    layout.make()
    syscalls.unshare(k.CLONE_NEWNS)
    syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)
    stage.make_stage(layout.stage)
    return layout
