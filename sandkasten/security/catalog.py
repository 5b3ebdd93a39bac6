"""All attempts made from outside of a session, in order.

Attempts made inside are in `probes/inside.py`; both together are the catalogue.
"""

from __future__ import annotations

from sandkasten.security.attacks.archives import ARCHIVES
from sandkasten.security.attacks.bridges import BRIDGES
from sandkasten.security.attacks.exhaustion import EXHAUSTION
from sandkasten.security.attacks.files import FILES
from sandkasten.security.attacks.front import FRONT
from sandkasten.security.attacks.memory import MEMORY
from sandkasten.security.attacks.quotas import QUOTAS
from sandkasten.security.attacks.results import RESULTS
from sandkasten.security.attacks.runner import RUNNER
from sandkasten.security.attacks.secrets import SECRETS
from sandkasten.security.attacks.ways_in import WAYS_IN
from sandkasten.security.attacks.ways_out import WAYS_OUT
from sandkasten.security.attacks.ways_out_servers import WAYS_OUT_SERVERS
from sandkasten.security.attacks.workspaces import WORKSPACES

ATTACKS = (
    *(*FILES, *WORKSPACES, *FRONT, *EXHAUSTION, *QUOTAS, *MEMORY, *RUNNER, *RESULTS, *ARCHIVES),
    *(*WAYS_OUT, *WAYS_OUT_SERVERS, *BRIDGES, *WAYS_IN, *SECRETS),
)
