"""The journal of events: numbered in memory (`ring.py`), with the fields of each type (`fields.py`). Does no I/O.

Imports `model` and `logcontext`; `actors/services/events.py` writes it to the database and reads for late readers.
"""
