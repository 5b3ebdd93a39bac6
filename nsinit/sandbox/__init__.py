"""The build of a sandbox: the ordered steps, and the code of those who perform them.

`build.py` is the order, as data. Imports `storage`, `cgroup`, `wire` and `kernel`; the helpers perform the steps. Begin
with `build.py`.
"""
