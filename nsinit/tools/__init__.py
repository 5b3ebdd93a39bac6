"""Programs that run as processes of their own, beside the fork server: launcher, probe, leftovers, unpacker.

Each file is executed by its path; no module imports it. `drop.py` is the exception: the daemon imports it to give root
away. Imports every other package. Begin with `launcher.py`.
"""
