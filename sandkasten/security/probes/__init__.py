"""Attempts made inside of a session, by the session's own Python.

Imports the standard library alone, because the package is sent into sandboxes as one file. Begin with `attempt.py`.
"""
