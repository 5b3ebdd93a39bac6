"""Messages of nsinit: with the daemon, with its launcher, with a sandbox under construction, with an unpacker.

Values and their codecs, without I/O, and the checks of every name and number in them. Imports `kernel`. The daemon
imports `protocol.py` and `launching.py`, and nothing else of nsinit but `spawn.py` and `tools/drop.py`. Begin with
`protocol.py`.
"""
