"""Tries on a throw-away directory what a sandbox needs: `python -I -S -B probe.py DIRECTORY [thorough|bridge]`.

A short-lived process. Its trials (`trials/`) run in a few processes of their own, so that namespaces, mounts and deaths
concern no other trial; they write to one directory, which is removed. The calls are those of the real build: on a
machine that passes, a build fails only for reasons of the session. The probe needs no privilege to run; the kernel says
which trial takes some. The answer, on stdout, is one JSON object: name of the check to its `attempt.Answer`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nsinit.tools.trials import cgroups, mounting, network, processes, storage
from nsinit.tools.trials.attempt import Answer, Room, Trial, attempt

_TOGETHER: tuple[dict[str, Trial], ...] = (
    {
        "clone3": processes.clone3,
        "pidfd": processes.pidfd,
        "close_range": processes.close_range,
        "openat2": processes.openat2,
        "namespaces": processes.namespaces,
        "user_namespace": processes.user_namespace,
        "id_ranges": processes.id_ranges,
        "keyring": processes.keyring,
        "record_locks": processes.record_locks,
        "loopback": network.loopback,
        "socket_diag": network.socket_diag,
        "sk_lookup": network.sk_lookup,
    },
    {
        "mounts": mounting.mount_calls,
        "overlay": mounting.overlay,
        "overlay_by_fd": mounting.overlay_by_descriptor,
        "idmapped_tmpfs": mounting.mapped_tmpfs,
        "tmpfs": mounting.tmpfs,
        "devpts": mounting.devpts,
        "proc": mounting.proc,
        "pivot_root": mounting.pivot_root,
    },
    {"capability_drop": processes.drop_capabilities},
    {"seccomp": processes.seccomp},
    {"landlock_scopes": processes.landlock_scopes, "landlock_files": processes.landlock_files},
)
"""Trials that share a process, in this order: some leave others their set-up."""
_THOROUGH: tuple[dict[str, Trial], ...] = (
    {"kernel_log": processes.kernel_log},
    {"disk": storage.best},
    *({name: trial} for name, trial in storage.trials().items()),
)
"""Trials of features that no start depends on."""
_BRIDGE: dict[str, Trial] = {"bridge": network.bridge}
"""A trial that may load modules, for an installation whose sessions may have the mode."""


def main() -> None:
    """Make all trials and print their answers."""
    is_thorough, has_bridge = ("thorough" in sys.argv[2:]), bool(sys.argv[2:])
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=sys.argv[1]) as directory:
        try:
            answers = _try_all(Room(directory, is_thorough), (_BRIDGE,) if has_bridge else ())
        finally:
            shutil.rmtree(f"{directory}/layers", ignore_errors=True)  # overlayfs leaves a directory of mode 000
    print(json.dumps(answers))


def _try_all(room: Room, more: tuple[dict[str, Trial], ...]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for trials in (*_TOGETHER, *more, *(_THOROUGH if room.is_thorough else ())):
        answers |= attempt(trials, room)
    return answers | cgroups.try_all(room)


if __name__ == "__main__":
    main()
