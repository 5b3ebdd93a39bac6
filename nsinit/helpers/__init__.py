"""The helpers: processes that nsinit forks at its start and keeps. The forker, the builders, the cgroup maker.

Each does one kind of work in a jail of its own, and is replaced when it dies. Imports `sandbox` and below; `server`,
which gives the orders, imports it. Begin with `pool.py`, nsinit's side of builders and cgroup maker.
"""
