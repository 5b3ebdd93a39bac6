"""Trials of the kernel for `nsinit/tools/probe.py`.

Each module has the trials of one part: cgroups, mounts, network, processes, storage. A trial makes the calls of the
real build, and says which of them the kernel refused. Imports every package of nsinit; `probe.py` imports it. Begin
with `attempt.py`.
"""
