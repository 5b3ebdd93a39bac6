"""One session: the actor that owns its record, lease, sandbox, runs and teardown.

Imports `runs`, `workspaces` and `services`; `node` starts the actors. Begin with `actor.py`.
"""
