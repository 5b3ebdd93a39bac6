"""All attempts that are made from outside of a session, in the order in which they are made.

Those made inside are `probes/inside.py`'s; together they are the catalogue.
"""

from __future__ import annotations

from sandkasten.security.attacks.archives import ARCHIVES
from sandkasten.security.attacks.exhaustion import EXHAUSTION
from sandkasten.security.attacks.files import FILES
from sandkasten.security.attacks.runner import RUNNER

ATTACKS = (*FILES, *EXHAUSTION, *RUNNER, *ARCHIVES)
