"""What runs wrote, kept outside of the sandboxes for later readers: in bounded memory, on bounded disk.

Also what the next daemon needs to know of each run. Imports `model` and `config`; `actors` imports it. Begin with
`spool.py`.
"""
