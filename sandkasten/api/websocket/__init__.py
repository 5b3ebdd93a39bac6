"""WebSockets: exec streams, terminals and events, each a protocol of messages over one connection.

Messages are values (`exec_messages.py`, `terminal_messages.py`); what is sent passes `outbox.py`, in order and with a
deadline. Imports `http` and `resources`; the route table imports it. Begin with `handshake.py`.
"""
