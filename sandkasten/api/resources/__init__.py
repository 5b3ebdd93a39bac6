"""Handlers of requests, one module for each resource: fields in, one question to the supervisor, an answer out.

Classes of requests and answers stand beside their handlers. `fields.py` has the kinds of field of requests and reads
bodies and queries; `run_output.py` spells ends and output of runs. Imports `http`; `websocket`, `openapi.py` and the
route table import it. Begin with `sessions.py`.
"""
