"""The machine around the daemon: checks and protections, the data directory, users, the service manager.

Imports `model` and `config`; the command line, the tree, `security` and `app` import it. Changes nothing but the data
directory. Begin with `checks.py`, the table of trials, protections and fixes; `examine.py` makes the checks,
`protections.py` adds them up.
"""
