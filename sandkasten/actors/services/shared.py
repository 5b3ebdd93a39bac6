"""What several parts of the tree work with. Made once, before any of them runs; who is restarted finds it again.

Declarations only. `Services` in `actors/session/birth.py` adds what a session needs besides.
"""

from __future__ import annotations

import attrs

from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.admission.quotas import KeyShares
from sandkasten.counters.metrics import Metrics
from sandkasten.crash import Crash
from sandkasten.journal.ring import Journal
from sandkasten.output.run_archive import RunArchive
from sandkasten.output.spool import Spool


@attrs.frozen(kw_only=True)
class Shared:
    """See the module's docstring. `shares`: the API keys besides the configured one, and what each has."""

    store: Ref
    zygote: Ref
    workspaces: Ref
    directory: SessionDirectory
    journal: Journal
    spool: Spool
    archive: RunArchive
    metrics: Metrics
    shares: KeyShares
    crash: Crash
