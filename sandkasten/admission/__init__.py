"""Admission: the node's budget, quotas of keys, the keys themselves, networks, and the plan of a sandbox.

Pure but for the file of keys. Stands on `model`, `config` and `counters`, and on the wire contracts of nsinit and the
egress process; `actors` asks it. Begin with `plan.py`: spec, configuration and image in, nsinit's plan out.
"""
