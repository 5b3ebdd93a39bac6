"""Admission: the node's budget, quotas of keys, the keys themselves, networks, and the plan of a sandbox.

Pure but for the file of keys. Imports `model`, `config`, `store` and `counters`; `actors` asks it. Begin with
`plan.py`: spec, configuration and image in, nsinit's plan out.
"""
