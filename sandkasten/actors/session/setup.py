"""What a session actor is handed when it is made: the rest of the tree, and how to build its sandbox."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import trio

from nsinit.wire.protocol import ImageKind
from runner.wire import protocol as runner_protocol
from sandkasten.actors.runs.persistence import Keep
from sandkasten.actors.services.shared import Shared
from sandkasten.admission.budget import Budget
from sandkasten.admission.plan import Resolved
from sandkasten.config import Disk, Maximum
from sandkasten.host.paths import DataPaths
from sandkasten.output.records import Seal

VESSEL = "vessel"
"""`acquire_detail` of a session that is made of a vessel."""


@attrs.frozen(kw_only=True)
class Services(Shared):
    """What a session needs of the rest of the tree. `cgroup_dirs` is `nsinit.wire.protocol.Ready.cgroup_dirs`.
    `expiries`: how many sessions whose lease ran out are ended at once, so that a thousand don't hold up all else;
    `adoptions`: how many are taken over at once, since nsinit's mailbox is bounded."""

    paths: DataPaths
    boot_id: str
    cgroup_dirs: Mapping[str, str]
    shell_queue_length: int
    max_exec_ids: int
    maximum: Maximum
    graces: runner_protocol.Graces
    run_key: bytes = attrs.field(repr=False)
    disk: Disk
    budget: Budget
    expiries: trio.CapacityLimiter
    adoptions: trio.CapacityLimiter

    def keep(self, session_id: str) -> Keep:
        """Return what keeps the runs of one session."""
        return Keep(
            seal=Seal(self.run_key, session_id),
            retention_s=self.output.retention_s,
            max_exec_ids=self.max_exec_ids,
        )


@attrs.frozen
class Creation:
    """How to make a new sandbox. `env` goes to the runner and nowhere else."""

    resolved: Resolved
    image: str
    image_kind: ImageKind
    env: Mapping[str, str] = attrs.field(repr=False)
