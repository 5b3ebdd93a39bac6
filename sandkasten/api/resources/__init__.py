"""Handlers of requests, one module for each resource: fields in, one question to the supervisor, an answer out.

Imports `http`; `websocket` and the route table import it. Begin with `sessions.py`; `fields.py` has the kinds of field
that requests are made of.
"""
