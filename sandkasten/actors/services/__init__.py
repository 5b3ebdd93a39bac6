"""Actors that the whole tree uses: the database writer, the connection to nsinit, images, events, ways out.

Imports `core` and the packages below `actors`; every other part of the tree may import it. Begin with `store.py`, the
one SQLite writer, and `nsinit.py`, the one connection to the privileged process.
"""
