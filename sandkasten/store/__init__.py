"""SQLite: the schema's migrations and the SQL for sessions, workspaces and events.

Synchronous functions over an open connection, run by `actors/services/store.py` in a thread of its own. Imports
`model`. Begin with `database.py`.
"""
