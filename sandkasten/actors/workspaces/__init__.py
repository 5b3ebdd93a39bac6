"""Persistent workspaces: their records, their holds, and access to their files without a session.

Imports `services`; `session`, `node` and the tree import it. Begin with `holds.py`, then `actor.py`.
"""
