"""Numbers: a session's cgroup counters, the node's capacity and use, and what the daemon counts itself.

Reads cgroup files and /proc, and writes nothing. Imports `model` alone. Begin with `cgroup.py`.
"""
