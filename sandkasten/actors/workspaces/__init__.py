"""Persistent workspaces: their records, who holds each of them, and their files without a session.

Imports `services`; `session` and `node` import it. Begin with `actor.py`.
"""
