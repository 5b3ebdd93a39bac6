"""Numbers: a session's cgroup counters, the node's capacity and use, and the daemon's own metrics.

Reads cgroup files and /proc, and writes nothing. Imports `model` and the wire contracts; `admission`, `host` and
everything above may import it. Begin with `cgroup.py`.
"""
