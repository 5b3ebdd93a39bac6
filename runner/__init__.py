"""PID 1 of a sandbox: shells, programs and files for the daemon, beside hostile code. Standard library only.

One process with one event loop, which serves one request at a time on each connection. `wire` is the contract with the
daemon. Packages in order, each importing those before it: `wire`, `loop`, `process` and `streams`, `shell`, `files` and
`programs`, `server`. Begin with `server/main.py`.
"""
