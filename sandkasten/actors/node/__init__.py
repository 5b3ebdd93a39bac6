"""All sessions of the machine: creating, finding and ending them, the pool, and reconciliation with the kernel.

Imports every other package of `actors`; only `tree.py` and its neighbours import it. Begin with `sessions.py`;
`reconcile.py` is the pure planner of what a start or a sweep has to do.
"""
