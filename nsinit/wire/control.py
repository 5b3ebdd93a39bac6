"""Messages over a sandbox's control socket while the sandbox is built. No foreign code has run at either end.

In order: PID 1 tells the builder that `proc` is mounted; the builder, when all is mounted and the builder has left the
namespaces, sends `Begin`; PID 1 tells nsinit `StepsDone`. In place of a message of its own PID 1 may send `Failed`, or
end. Helpers answer their orders with the same `StepsDone` and `Failed`. PID 1 uses the bare descriptor: a socket object
would cost memory in every sandbox.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

from nsinit.steps import StepFailed
from nsinit.wire.protocol import MAX_DATAGRAM_BYTES, Failed
from runner.wire.codec import Vocabulary

_PROC = b"proc"
_BEGIN = struct.Struct("=QQB?I?I")


RootId = tuple[int, int]
"""Device and inode of a root directory; the device is that of one overlay mount alone."""


class Begin(NamedTuple):
    """The builder's word to PID 1 to go on: device and inode of the new root, the number of the system call filter
    (`seccomp.filters`), whether commands may be root, how many files a process may open, whether the sandbox has files
    only and no commands, and how many datagram and netlink sockets there may be (`runner.server.sockets`)."""

    device: int
    inode: int
    filter_number: int
    root_inside: bool
    open_files: int
    files_only: bool
    sockets: int


@dataclass(frozen=True, slots=True)
class StepsDone:
    """Success, and how many microseconds each step took."""

    timings_us: dict[str, int]


STATUS = Vocabulary(StepsDone, Failed)
READY = STATUS.encode(StepsDone({}))
"""A helper's first message to nsinit: orders may come."""


def say_proc(control_fd: int) -> None:
    """Tell the builder, as PID 1, that `proc` is mounted."""
    os.write(control_fd, _PROC)


def wait_proc(control: socket.socket) -> None:
    """Wait, as the builder, until `proc` is mounted. Raises `StepFailed` with the failure that PID 1 reports."""
    try:
        data = control.recv(MAX_DATAGRAM_BYTES)
    except ConnectionResetError:
        data = b""
    if data != _PROC:
        read_status(data)
        raise StepFailed("child", "the child spoke out of turn")


def say_begin(control: socket.socket, begin: Begin) -> None:
    """Let PID 1 go on, as the builder. Raises `StepFailed` when PID 1 is gone."""
    try:
        control.send(_BEGIN.pack(*begin))
    except OSError as error:
        raise StepFailed("child", "the child died without a word", errno=error.errno or 0) from error


def wait_begin(control_fd: int) -> Begin | None:
    """Wait, as PID 1, for the builder's word; None when builder and nsinit have closed the socket."""
    data = os.read(control_fd, _BEGIN.size)
    return Begin._make(_BEGIN.unpack(data)) if data else None


def read_status(data: bytes) -> dict[str, int]:
    """Return the timings in a status. Raises `StepFailed`: the failure in the status, or a death (no data)."""
    if not data:
        raise StepFailed("child", "the child died without a word")
    match STATUS.decode(data):
        case StepsDone(timings_us):
            return timings_us
        case Failed() as failed:
            raise StepFailed(failed.stage, failed.message, path=failed.path, errno=failed.errno)
        case unexpected:
            raise StepFailed("child", f"unexpected {type(unexpected).__name__}")


def describe(error: StepFailed) -> bytes:
    """Return the `Failed` datagram for a failure."""
    return STATUS.encode(Failed(0, error.stage, error.path, error.errno, str(error)[:500]))
