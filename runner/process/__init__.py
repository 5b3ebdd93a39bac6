"""Processes of the sandbox: how a fork becomes a program, as which user, and how all it started is found and ended.

Imports `loop`. Begin with `spawn.py`: the order of its steps is the security of it.
"""
