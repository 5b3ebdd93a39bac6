"""PID 1's process: connections, requests, runs that outlive their connection, ports; and its entry, `main.py`.

Imports every other package of the runner. Begin with `main.py`.
"""
