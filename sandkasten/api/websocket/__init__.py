"""WebSockets: exec streams, terminals and events, each a protocol of messages over one connection.

Messages are values: those shared by all in `messages.py`, the others in `exec_messages.py` and `terminal_messages.py`.
Frames to a client pass `outbox.py`, in order and with a deadline. Imports `http` and `resources`; the route table
imports it. Begin with `handshake.py`.
"""
