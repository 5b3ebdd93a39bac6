"""All attempts that are made from outside of a session, in the order in which they are made.

Those made inside are `probes/inside.py`'s; together they are the catalogue.
"""

from __future__ import annotations

from sandkasten.security.attacks.archives import ARCHIVES
from sandkasten.security.attacks.exhaustion import EXHAUSTION
from sandkasten.security.attacks.files import FILES
from sandkasten.security.attacks.front import FRONT
from sandkasten.security.attacks.runner import RUNNER
from sandkasten.security.attacks.workspaces import WORKSPACES

ATTACKS = (*FILES, *WORKSPACES, *FRONT, *EXHAUSTION, *RUNNER, *ARCHIVES)
