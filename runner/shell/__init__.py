"""Persistent shells: one process each, a queue in front of it, and one command at a time.

Imports `process` and `streams`. Begin with `shell.py`, then `execution.py`, one command of a shell.
"""
