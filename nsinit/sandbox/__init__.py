"""The build of a sandbox: the ordered steps, and the code of those who perform them.

`build.py` is the order, as data. Imports `storage`, `cgroup`, `wire` and `kernel`; `helpers`, which perform the
steps, and `server` import it. Begin with `build.py`.
"""
