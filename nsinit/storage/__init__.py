"""Files of sessions on disk: the mechanisms that limit a session's disk, workspaces, volumes, and their removal.

Imports `wire` and `kernel`; `sandbox` and every package above import it. Begin with `paths.py`, which
has every path in the data directory, then `mechanism.py`.
"""
