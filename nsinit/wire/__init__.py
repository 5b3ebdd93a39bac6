"""Messages of nsinit: with the daemon, with its launcher, with a sandbox under construction, with an unpacker.

Values and their codecs, without I/O, and the checks of every name and number in them. Imports `kernel`. The daemon
imports it, and nothing else of nsinit but `spawn.py`, `tools/drop.py` and `cgroup/beside.py`. Begin with `protocol.py`.
"""
