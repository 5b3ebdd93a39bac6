"""What a session actor is handed when it is made: the rest of the tree, and how to build its sandbox."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import trio

from nsinit.protocol import ImageKind
from runner import protocol as runner_protocol
from sandkasten.actors.actor import Ref
from sandkasten.actors.directory import SessionDirectory
from sandkasten.actors.run_keeping import Keep
from sandkasten.config import Disk, Maximum
from sandkasten.crash import Crash
from sandkasten.runtime.budget import Budget
from sandkasten.runtime.journal import Journal
from sandkasten.runtime.metrics import Metrics
from sandkasten.runtime.paths import DataPaths
from sandkasten.runtime.plan import Resolved
from sandkasten.runtime.quotas import KeyShares
from sandkasten.runtime.run_archive import RunArchive
from sandkasten.runtime.run_records import Seal
from sandkasten.runtime.spool import Spool

VESSEL = "vessel"
"""`acquire_detail` of a session that is made of a vessel."""


@attrs.frozen
class Services:
    """What a session needs of the rest of the tree. `cgroup_dirs` is `nsinit.protocol.Ready.cgroup_dirs`.
    `expiries`: how many sessions whose lease ran out are ended at once, so that a thousand don't hold up all else;
    `adoptions`: how many are taken over at once, since nsinit's mailbox is bounded."""

    store: Ref
    zygote: Ref
    workspaces: Ref
    directory: SessionDirectory
    paths: DataPaths
    boot_id: str
    cgroup_dirs: Mapping[str, str]
    shell_queue_length: int
    max_exec_ids: int
    maximum: Maximum
    graces: runner_protocol.Graces
    journal: Journal
    spool: Spool
    archive: RunArchive
    run_key: bytes = attrs.field(repr=False)
    writing: trio.CapacityLimiter
    recovering: trio.CapacityLimiter
    disk: Disk
    budget: Budget
    shares: KeyShares
    expiries: trio.CapacityLimiter
    adoptions: trio.CapacityLimiter
    metrics: Metrics
    crash: Crash

    def keep(self, session_id: str) -> Keep:
        """Return what keeps the runs of one session."""
        return Keep(
            archive=self.archive.session(session_id),
            seal=Seal(self.run_key, session_id),
            writing=self.writing,
            recovering=self.recovering,
            retention_s=self.spool.retention_s,
            max_exec_ids=self.max_exec_ids,
        )


@attrs.frozen
class Creation:
    """How to make a new sandbox. `env` goes to the runner and nowhere else."""

    resolved: Resolved
    image: str
    image_kind: ImageKind
    env: Mapping[str, str] = attrs.field(repr=False)
