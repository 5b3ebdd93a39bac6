"""The fork server's own process: one connection to the daemon, one thread, requests carried out as jobs.

Imports every other package but `tools`, whose store import and trials import it. Begin with `server.py`, the loop, then
`requests.py`, the table of requests, and `sessions.py`, the operations on sessions.
"""
