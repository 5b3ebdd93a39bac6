"""The journal of events: numbered in memory (`ring.py`), with the fields of each type (`fields.py`). Does no I/O.

Imports `model` and `logcontext`, and egress' wire contract; `actors` and `api` import it. `actors/services/events.py`
writes the events to the database and reads them for late readers. Begin with `ring.py`.
"""
