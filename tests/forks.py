"""The loop of a seed: a process that has imported what its forks need, and makes one for each message.

A fork is a child of whoever runs the seed (clone(2), CLONE_PARENT).
"""

from __future__ import annotations

import array
import gc
import os
import socket

from nsinit.kernel import syscalls

MAX_BYTES = 256 * 1024


def next_fork(requests: socket.socket, name: str, descriptors: int) -> tuple[bytes, list[int]] | None:
    """Serve requests; return in each fork, with its message and its descriptors, and None in the seed at the end."""
    syscalls.set_name(name)
    gc.collect()
    gc.freeze()
    cloner = syscalls.Cloner(0)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, MAX_BYTES, descriptors)
        if not data:
            return None
        if (pid := cloner.clone(-1)) == 0:
            requests.detach()
            return data, fds
        requests.send(array.array("i", [pid]))
        for fd in fds:
            os.close(fd)
