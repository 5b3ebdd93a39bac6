"""The daemon's ends of its sockets: to nsinit (`nsinit.py`), to the egress process (`egress.py`) and to PID 1 of each
sandbox (`runner.py`).

Owns the processes behind the first two (`processes.py`) and descriptors, those of the kernel's out-of-memory
notifications among them (`fds.py`). Imports `host`, `errors` and the wire contracts; `actors`, `app` and what stands
above import it. Begin with `runner.py`.
"""
