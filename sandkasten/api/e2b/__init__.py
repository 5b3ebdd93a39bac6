"""E2B's wire contract over our supervisor: translation only, and no part below knows of it. Off unless `e2b.enabled`.

`front.py` decides which requests are E2B's, checks keys and tokens, and spells errors. `control.py` is the control API.
Of what E2B calls envd, `process.py`, `filesystem.py`, `files.py` and `watch.py` are the services, and `connect.py` is
their codec. `accounts.py` makes the user that programs of E2B expect. Imports `http` and `resources`; only
`api/app.py` imports it. Begin with `front.py`.
"""
