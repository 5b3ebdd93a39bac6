"""Cgroups in v1, v2 and hybrid: found, made, limited, frozen, counted, emptied and removed.

Imports `kernel`, `wire`, `steps` and `scheduler`; `storage` and every package above import it. Begin with
`tree.py`, which finds the hierarchies, then `session.py`.
"""
