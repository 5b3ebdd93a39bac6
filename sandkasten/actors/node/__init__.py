"""All sessions of the node: creating, finding and ending them, the pool, and recovery after a restart.

Imports every other package of `actors`; only the tree and the modules beside it import it. Begin with `sessions.py`;
`reconcile.py` is the pure planner of a start and of a sweep.
"""
