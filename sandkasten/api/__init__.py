"""The HTTP front: REST, server-sent events and WebSockets over the supervisor's interface. Imports no actor.

`http` is transport, `resources` the handlers of each noun with the classes of their requests and answers, `websocket`
the long connections. `routes.py` is the one table of routes, from which `app.py` serves and `openapi.py` describes.
Only `sandkasten/app.py` and the command line import this package. Begin with `routes.py`.
"""
