"""The child's life from clone3 to the runner: prepare, wait for a plan, furnish, say ready, become PID 1's program.

Owns the private conversation with nsinit over one socket pair: a `Build` datagram in, one `Furnished` or `Failed` out.
Never returns into nsinit's code. The peer is trusted on both sides: no foreign code has run when the socket closes.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from nsinit import build, syscalls
from nsinit import constants as k
from nsinit.protocol import MAX_DATAGRAM_BYTES, REQUESTS, Build, Failed, SandboxPlan
from nsinit.steps import StepFailed, failure_of
from runner.wire import Vocabulary

Enter = Callable[[int, Callable[[], None]], NoReturn]
"""Hands a process to the runner: (listener descriptor, what to call when it is about to serve)."""


@dataclass(frozen=True, slots=True)
class Furnished:
    """The runner serves; how long each step of the child took."""

    timings_us: dict[str, int]


STATUS = Vocabulary(Furnished, Failed)


def live(box: build.Box, control: socket.socket, enter: Enter) -> NoReturn:
    """Run the child. Ends the process, always."""
    try:
        _live(box, control, enter)
    except StepFailed as error:
        _report(control, error)
    except Exception as error:  # noqa: BLE001 - the last frame of the process: nothing may unwind into nsinit's stack
        _report(control, failure_of("child", error))
    finally:
        os._exit(1)


def _live(box: build.Box, control: socket.socket, enter: Enter) -> None:
    build.prepare(box)
    plan = box.plan or _wait_plan(box, control)
    if plan is not None:
        build.furnish(box, plan)
        enter(box.listener_fd, lambda: _say_ready(box, control))


def _wait_plan(box: build.Box, control: socket.socket) -> SandboxPlan | None:
    """Block until the plan comes; None when nsinit is gone."""
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    data, ancillary, _, _ = control.recvmsg(MAX_DATAGRAM_BYTES, room)
    if not data:
        return None
    for _, _, payload in ancillary:
        (box.workspace_userns_fd,) = array.array("i", payload)
    message = REQUESTS.decode(data)
    assert isinstance(message, Build)
    return message.plan


def _say_ready(box: build.Box, control: socket.socket) -> None:
    """From here on the sandbox lives on its own. If nsinit is already gone this raises, and the sandbox dies."""
    syscalls.prctl(k.PR_SET_PDEATHSIG, 0)
    control.sendall(STATUS.encode(Furnished(box.steps.timings_us)))
    control.close()


def _report(control: socket.socket, error: StepFailed) -> None:
    message = Failed(0, error.stage, error.path, error.errno, str(error)[:500])
    try:
        control.sendall(STATUS.encode(message))
    except OSError:
        pass  # nsinit is gone, or the runner ended after it was ready: then the exit itself is the message
