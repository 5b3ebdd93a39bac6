"""The contract between the daemon and PID 1: frames, messages and limits, and the strict codec below them.

Sans-I/O: bytes in, values out. Imports nothing; the daemon and nsinit import it. Begin with `protocol.py`.
"""
