"""Admission: the node's budget, quotas of keys, the keys themselves, networks, and the plan of a sandbox.

Pure but for the file of keys. Imports `model`, `config` and `counters`, and the wire contracts of nsinit and the egress
process; `host`, `actors`, `api` and above import it. Begin with `plan.py`: spec, configuration and image in, nsinit's
plan out.
"""
