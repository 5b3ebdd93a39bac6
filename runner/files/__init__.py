"""Requests for files: reading, writing, listing, changes and archives, done by forked workers as the user of each.

Imports `process` and below; `server` imports it. Paths are resolved by the kernel with the user's rights (`paths.py`).
Begin with `worker.py`.
"""
