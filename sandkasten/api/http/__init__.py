"""HTTP as a transport: the accept loop, connections with deadlines, one request and its answer, errors, keys.

Knows no URL and no resource of ours. Imports `supervisor`, `model`, `admission`; the rest of `api` imports it. Begin
with `exchange.py`, one request and its answer.
"""
