"""File requests: reading, writing, listing and archives, done as the sandbox user in a forked worker.

Imports `process` and below. Paths are resolved by the kernel with the user's rights (`paths.py`). Begin with
`worker.py`.
"""
