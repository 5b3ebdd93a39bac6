"""Standard streams of runs, pumped without blocking: pipes, FIFOs and pseudo-terminals.

Imports `loop` and `wire`; `shell`, `programs` and `server` import it. Begin with `flow.py`: one descriptor, read or
written as its other end allows. `streams.py` puts the descriptors of one run together, `pty.py` makes pseudo-terminals.
"""
