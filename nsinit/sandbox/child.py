"""The life of PID 1 from clone3 to the runner: its own first steps, the builder's word, power away, the runner.

Never returns into nsinit's code. What is said on the control socket, and by whom, is in `control`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn, Protocol

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.sandbox import build, init_steps
from nsinit.sandbox.init_steps import Init
from nsinit.steps import StepFailed, failure_of
from nsinit.wire import control


class Runner(Protocol):
    """What PID 1 becomes."""

    def rehearse(self) -> None:
        """Touch what serving will touch; nothing of the sandbox is there yet."""

    def enter(self, init: Init, on_ready: Callable[[], None]) -> NoReturn:
        """Take the process over; `on_ready` is called when it is about to serve."""


def live(init: Init, runner: Runner) -> NoReturn:
    """Run the child. Ends the process, always."""
    try:
        init.steps.run(build.BIRTH_STEPS, init)
        with init.steps.step("rehearsal"):
            _touch_power_steps()
            runner.rehearse()
        word = control.wait_begin(init.control_fd)
        if word is not None:
            init_steps.begin(init, word)
            init.steps.run(build.POWER_STEPS, init)
            runner.enter(init, lambda: _say_ready(init))
    except StepFailed as error:
        _report(init, error)
    except Exception as error:  # noqa: BLE001 - the last frame of the process: nothing may unwind into nsinit's stack
        _report(init, failure_of("child", error))
    finally:
        os._exit(1)


def _touch_power_steps() -> None:
    """Count a reference to what the steps to come will count references to: see `runner.server.main.rehearse`."""
    for _name, step in build.POWER_STEPS:
        code = getattr(step, "__code__", None)
        if code is not None:
            for part in (code.co_consts, code.co_names, code.co_varnames):
                for _each in part:
                    pass


def _say_ready(init: Init) -> None:
    """From here on the sandbox lives on its own, unless it is there for files only: that one goes with nsinit. (To
    change one's ids takes the signal away, so it is set anew.) If nsinit is already gone this raises, and the sandbox
    dies. While it was built it went before everybody (`vessel.BUILDING_SHARE`); now nsinit should hear of it first."""
    syscalls.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL if init.files_only else 0)
    os.write(init.control_fd, control.STATUS.encode(control.Done(init.steps.timings_us)))
    os.close(init.control_fd)
    os.sched_yield()


def _report(init: Init, error: StepFailed) -> None:
    try:
        os.write(init.control_fd, control.describe(error))
    except OSError:
        pass  # nsinit is gone, or the runner ended after it was ready: then the exit itself is the message
