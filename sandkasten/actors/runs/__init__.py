"""The runs of one session: commands, background processes and terminals, from their request to their end.

Imports `services`; `session` owns the objects made here. Begin with `run.py`, the state of one run, then `runs.py`,
which admits, queues, drives and settles runs.
"""
