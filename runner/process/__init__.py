"""Processes of the sandbox: a fork becomes a program of some user, and all processes of a run are found and signalled.

Imports `loop` and `wire`; `files`, `shell`, `programs` and `server` import it. Begin with `spawn.py`: the order of its
steps is the security of it.
"""
