"""Standard streams of commands and programs: pipes, FIFOs and pseudo-terminals, pumped without blocking.

Imports `loop`. Begin with `pipes.py`.
"""
