"""All attempts that are made from outside of a session, in the order in which they are made.

Those made inside are `probes/inside.py`'s; together they are the catalogue.
"""

from __future__ import annotations

ATTACKS = ()
