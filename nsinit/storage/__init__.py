"""Files of sessions on disk: the ways to limit a session's disk, workspaces, volumes, and their removal.

Imports `cgroup`, `wire` and `kernel`. Begin with `paths.py`, every path in the data directory, then `mechanism.py`.
"""
