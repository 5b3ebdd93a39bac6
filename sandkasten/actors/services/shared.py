"""What several parts of the tree work with. Made once, before any of them runs; who is restarted finds it again.

Declarations only. What a session is handed besides is in `session_setup.py`.
"""

from __future__ import annotations

import attrs

from sandkasten.actors.core import Ref
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.admission.quotas import KeyShares
from sandkasten.counters.metrics import Metrics
from sandkasten.crash import Crash
from sandkasten.journal.ring import Journal
from sandkasten.output.store import OutputStore


@attrs.frozen(kw_only=True)
class Shared:
    """See the module's docstring. `shares`: the API keys besides the configured one, and what each has."""

    store: Ref
    zygote: Ref
    workspaces: Ref
    directory: SessionDirectory
    journal: Journal
    output: OutputStore
    metrics: Metrics
    shares: KeyShares
    crash: Crash
