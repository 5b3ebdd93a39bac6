"""The daemon's ends of its two sockets: to nsinit (`nsinit.py`) and to PID 1 of each sandbox (`runner.py`).

Owns descriptors (`fds.py`) and the kernel's out-of-memory notifications (`oom_event.py`). Imports `model` and the two
wire contracts; `actors` imports it. Begin with `runner.py`.
"""
