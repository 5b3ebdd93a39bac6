"""The private conversation over a sandbox's control socket, while it is built. No foreign code has run at either end.

PID 1 says first, to the builder: `proc` is mounted. The builder, when all is mounted and it has left: `Begin`. PID 1,
to nsinit: `Furnished`. Instead of either word of its own PID 1 may say `Failed`, or nothing and end.
PID 1 has no socket object, which would cost it memory, only the descriptor.
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
_BEGIN = struct.Struct("=QQB?I?")


RootId = tuple[int, int]
"""Device and inode of a root directory; the device is that of one overlay mount alone."""


class Begin(NamedTuple):
    """What PID 1 must know to go on: its root, the number of its system call filter (`seccomp.filters`), whether
    commands may be root, so that it keeps what that takes, how many files a process may open, and whether there are no
    commands at all, only files."""

    device: int
    inode: int
    filter_number: int
    root_inside: bool
    open_files: int
    files_only: bool


@dataclass(frozen=True, slots=True)
class Furnished:
    """Done, and how long each step took."""

    timings_us: dict[str, int]


STATUS = Vocabulary(Furnished, Failed)
READY = STATUS.encode(Furnished({}))
"""A helper of nsinit's, to it: orders may come."""


def say_proc(control_fd: int) -> None:
    """PID 1: `proc` is mounted."""
    os.write(control_fd, _PROC)


def wait_proc(control: socket.socket) -> None:
    """The builder: wait until `proc` is mounted. Raises `StepFailed` with what PID 1 says instead."""
    try:
        data = control.recv(MAX_DATAGRAM_BYTES)
    except ConnectionResetError:
        data = b""
    if data != _PROC:
        read_status(data)
        raise StepFailed("child", "the child spoke out of turn")


def say_begin(control: socket.socket, begin: Begin) -> None:
    """The builder: let PID 1 go on. Raises `StepFailed` when it is gone."""
    try:
        control.send(_BEGIN.pack(*begin))
    except OSError as error:
        raise StepFailed("child", "the child died without a word", errno=error.errno or 0) from error


def wait_begin(control_fd: int) -> Begin | None:
    """PID 1: wait for the builder; None when nobody is there any more."""
    data = os.read(control_fd, _BEGIN.size)
    return Begin._make(_BEGIN.unpack(data)) if data else None


def read_status(data: bytes) -> dict[str, int]:
    """Return the timings that came. Raises `StepFailed` with what the other end says, or that it died (no data)."""
    if not data:
        raise StepFailed("child", "the child died without a word")
    match STATUS.decode(data):
        case Furnished(timings_us):
            return timings_us
        case Failed() as failed:
            raise StepFailed(failed.stage, failed.message, path=failed.path, errno=failed.errno)
        case unexpected:
            raise StepFailed("child", f"unexpected {type(unexpected).__name__}")


def describe(error: StepFailed) -> bytes:
    """Return the `Failed` datagram for a failure."""
    return STATUS.encode(Failed(0, error.stage, error.path, error.errno, str(error)[:500]))
