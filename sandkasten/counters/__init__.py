"""Numbers: a session's cgroup counters, the node's capacity and use, and the daemon's own metrics.

Reads cgroup files and /proc, and writes nothing. Stands on `model` and the wire contracts. Begin with `cgroup.py`.
"""
