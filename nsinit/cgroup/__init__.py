"""Cgroups in v1, v2 and hybrid: found, made, limited, frozen, counted, emptied and removed.

Imports `kernel` and `wire`. Begin with `tree.py`, which finds the hierarchies, then `session.py`.
"""
