"""The neighbour, another session: lays out every object that attempts look for, so that not finding one has a meaning.

Runs inside a session; standard library only. An object that the kernel refuses is left out.
"""

from __future__ import annotations

import os
import socket
import sys

from sandkasten.security.probes.attempt import OutsideFacts
from sandkasten.security.probes.kernel import answer, get

PLANTED = "planted"


def plant(target: OutsideFacts) -> None:
    """Listen, make IPC objects and files, say `planted`, and stay until standard input ends."""
    secret = os.environ["NEIGHBOUR_SECRET"]
    port = socket.create_server(("127.0.0.1", target.neighbour_port))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + target.abstract_name)
    abstract.listen()
    for name, *arguments in (
        ("shmget", target.ipc_key, 4096, 0o1666),
        ("msgget", target.ipc_key, 0o1666),
        ("mq_open", b"sk-canary-queue", os.O_CREAT | os.O_RDWR, 0o666, 0),
    ):
        answer(get, name, *arguments)
    for path in ("/workspace/secret", "/tmp/secret", "/dev/shm/secret"):
        with open(path, "w") as file:
            file.write(secret)
    print(PLANTED, flush=True)
    sys.stdin.read()
    port.close()
    abstract.close()
