"""The HTTP front: REST, server-sent events and WebSockets over the supervisor's interface.

`http` is transport, `resources` the handlers of each noun with the classes of their requests and answers, `websocket`
the long connections. `routes.py` is the one table of routes, from which `app.py` serves and `openapi.py` describes.
Imports `admission`, `config`, `counters`, `journal`, `mcp`, `model` and `sdk`, and no actor; `app`, `security` and the
command line import it. Begin with `routes.py`.
"""
