"""E2B's wire contract over our supervisor: translation only, and no part below knows of it. Off unless `e2b.enabled`.

`front.py` decides which requests are E2B's, checks keys and tokens, and spells errors. `control.py` is the control API.
Of what E2B calls envd, `process.py`, `filesystem.py` and `files.py` are the services, `calls.py` serves them and
`connect.py` is their codec. `sandboxes.py` is what a session needs to be a sandbox of E2B. Imports `http` and
`resources`; only `api/app.py` and `sandkasten/app.py` import it. Begin with `front.py`.
"""
