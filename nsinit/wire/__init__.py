"""Messages of nsinit: with the daemon (`protocol.py`), with its launcher, and with a sandbox under construction.

Values and their codecs, without I/O, and the checks of every name and number in them. Imports `kernel`; the daemon
imports `protocol.py` and `launching.py` and nothing else of nsinit but `spawn.py`. Begin with `protocol.py`.
"""
