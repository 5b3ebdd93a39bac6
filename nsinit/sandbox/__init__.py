"""Building one sandbox: the ordered steps and those who perform them.

`build.py` is the order, as data. Imports `storage`, `cgroup`, `wire` and `kernel`; the helpers perform the steps.
Begin with `build.py`.
"""
