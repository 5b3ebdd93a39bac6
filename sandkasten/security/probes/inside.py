"""All attempts made inside a session, in order.

Runs inside a session; standard library only.
"""

from __future__ import annotations

from sandkasten.security.probes.boundaries import BOUNDARIES
from sandkasten.security.probes.descriptors import DESCRIPTORS
from sandkasten.security.probes.files import FILES
from sandkasten.security.probes.network import NETWORK
from sandkasten.security.probes.processes import PROCESSES
from sandkasten.security.probes.surface import SURFACE

INSIDE = (*PROCESSES, *DESCRIPTORS, *FILES, *BOUNDARIES, *SURFACE, *NETWORK)
