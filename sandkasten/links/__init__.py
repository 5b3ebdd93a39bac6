"""The daemon's ends of its sockets: to nsinit (`nsinit.py`), to the egress process (`egress.py`) and to PID 1 of each
sandbox (`runner.py`).

Owns the processes behind the first two (`processes.py`) and descriptors, those of the kernel's out-of-memory
notifications among them (`fds.py`). Stands on `model`, `host` and the wire contracts; `actors` imports it. Begin with
`runner.py`.
"""
