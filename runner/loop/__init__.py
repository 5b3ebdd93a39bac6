"""Foundations of PID 1: the event loop, the reaper, identities, settings, and the context that all parts share.

Imports `wire`; every other package imports it. Begin with `loop.py`.
"""
