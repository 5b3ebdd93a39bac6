"""The machine around the daemon: checks and protections, the data directory, users, the service manager.

Imports `model`, `config`, `counters`, `admission` and `installation`, and the wire contract of nsinit; `links`,
`actors`, `security`, the command line and `app` import it. Changes nothing but the data directory. Begin with
`checks.py`, the table of trials, protections and fixes; `examine.py` makes the checks, `protections.py` adds them up.
"""
