"""Process of PID 1: connections, requests, kept runs, ports; and its entry, `main.py`.

Imports every other package of the runner; nsinit, which runs `main.py`, imports it. Begin with `main.py`.
"""
