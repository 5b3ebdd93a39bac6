"""SQLite: the schema's migrations and the SQL for sessions, workspaces and events.

Synchronous functions over an open connection, run by `actors/services/store.py` in a thread of its own. Imports
`model`; `actors`, `app` and the command line import it. Begin with `database.py`.
"""
