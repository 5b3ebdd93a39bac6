"""Attempts made from outside of a session, and the field in which all attempts are made.

Each module is one kind of attack. `field.py` starts a supervisor of its own with a session to attack from, a neighbour
and canaries. Imports `app` and below; `catalog.py` above lists the attempts. Begin with `field.py`.
"""
