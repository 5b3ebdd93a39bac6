"""Processes that nsinit forks at its start and keeps: the forker, the builders, the cgroup maker.

Each does one kind of work in a jail of its own and is replaced when it dies (`pool.py`). Imports `sandbox` and below;
`server` gives the orders. Begin with `pool.py`.
"""
