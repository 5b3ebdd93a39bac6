"""What a session actor is handed when it is made: the rest of the tree, and how to build its sandbox."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from nsinit.protocol import ImageKind
from runner.protocol import Graces
from sandkasten.actors.actor import Ref
from sandkasten.actors.directory import SessionDirectory
from sandkasten.config import Disk
from sandkasten.runtime.journal import Journal
from sandkasten.runtime.paths import DataPaths
from sandkasten.runtime.plan import Resolved
from sandkasten.runtime.spool import Spool


@attrs.frozen
class Services:
    """What a session needs of the rest of the tree. `cgroup_dirs` is `nsinit.protocol.Ready.cgroup_dirs`."""

    store: Ref
    zygote: Ref
    directory: SessionDirectory
    paths: DataPaths
    cgroup_dirs: Mapping[str, str]
    shell_queue_length: int
    graces: Graces
    journal: Journal
    spool: Spool
    disk: Disk


@attrs.frozen
class Creation:
    """How to make a new sandbox. `env` goes to the runner and nowhere else."""

    resolved: Resolved
    image: str
    image_kind: ImageKind
    env: Mapping[str, str] = attrs.field(repr=False)
