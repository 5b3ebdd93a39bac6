"""Kernel interfaces, one module each: system calls, capabilities, Landlock, seccomp, mounts, user ids.

`syscalls.py` is the only file that loads a C library. Imports the standard library alone; every package of nsinit
imports it. Begin with `syscalls.py`.
"""
