"""The HTTP front: REST, server-sent events and WebSockets over the supervisor's interface. Imports no actor.

`http` is transport, `resources` the handlers of each noun, `websocket` the long connections; `routes.py` is the table
of URLs and `app.py` the ASGI application that puts them together. Begin with `routes.py`.
"""
