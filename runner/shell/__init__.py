"""Persistent shells: one process each, a queue in front of it, and one command at a time.

Imports `process`, `streams` and below; `programs` and `server` import it. Begin with `lifecycle.py`, the states of a
run as a table; `run.py` and `execution.py` perform it for a command. `shell.py` is the shell's process,
`command_driver.py` the program that it runs.
"""
