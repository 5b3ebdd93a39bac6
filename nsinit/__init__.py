"""The fork server: the privileged process that makes and removes sandboxes for the daemon. Standard library only.

Single-threaded, holds no secret, and trusts neither the daemon nor any byte of a sandbox. `wire` is the contract with
the daemon, `server/requests.py` the table of requests, `sandbox/build.py` the order in which a sandbox is built.
Packages in order, each importing those before it: `kernel`, `wire`, `cgroup`, `storage`, `sandbox`, `helpers`,
`server`, `tools`. Modules beside the packages serve several of them. Programs that start nsinit import `spawn` and
`wire`.
Begin with `server/server.py`.
"""
