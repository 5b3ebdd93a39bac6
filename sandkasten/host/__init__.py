"""The machine around the daemon: checks and protections, the data directory, users, the service manager.

Imports `model` and `config`; the command line, the tree and `app` import it. Changes nothing but the data directory.
Begin with `examine.py`, which makes the checks, and `checks.py`, their catalogue.
"""
