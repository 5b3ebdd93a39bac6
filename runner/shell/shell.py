"""One persistent shell: its process, its link, its death and its successor.

`Shell` hands commands over and reports statuses and deaths. Unless it is closed, a process waits for the next command,
runs one, or is being started. The output of a command, and its end by force, are the business of `Execution`.

Sources: getrusage(2) (blocks of 512 bytes).
"""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runner.loop.context import Context
from runner.loop.identity import ROOT, UserIdentity
from runner.loop.loop import Timer
from runner.loop.settings import Change
from runner.process import process_set
from runner.process.spawn import Membership, find_unreadable_copy, set_oom_score, spawn
from runner.process.storage import WriteMeter
from runner.shell import command_driver
from runner.shell.files import PrivateDirectory
from runner.shell.link import Link, Reports

_MAX_FAILED_STARTS = 3
_START_RETRY_S = 0.1
_PICK_UP_CHECKS = 10
_BLOCK_BYTES = 512
_NO_PROCESS = "the shell cannot be started"

_SHELLS = {
    "bash": ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"),
    "sh": ("/bin/sh", "/usr/bin/sh"),
    "busybox": ("/bin/busybox", "/usr/bin/busybox"),
}


def find_shell(preferred: str) -> list[str] | None:
    """Return the argv that starts the preferred shell, or the best the image has, or None."""
    if preferred.startswith("/"):
        candidates = [preferred]
    else:
        candidates = [path for name in (preferred, "bash", "sh", "busybox") for path in _SHELLS.get(name, ())]
    for path in candidates:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o001:
            return [path, "sh"] if path.endswith("/busybox") else [path]
    return None


def is_busybox(path: str) -> bool:
    """Return whether a shell is BusyBox's, by whatever name."""
    return os.path.basename(os.path.realpath(path)) == "busybox"


@dataclass(frozen=True, slots=True)
class ShellEvents:
    """Calls that a `Shell` makes to its owner. `on_ready`: a new process waits for a command. `on_begun`: the shell
    begins the command handed over last. `on_status(status)`: that command has ended. `on_unstarted`: it was not begun,
    and never will be. `on_death(wait status)`: a process that had been ready is gone. `on_failed`: no process can be
    started. `on_rested`: the process that `rest` ended is gone. `on_error`: a turn was lost."""

    on_ready: Callable[[], None]
    on_begun: Callable[[], None]
    on_status: Callable[[int], None]
    on_unstarted: Callable[[], None]
    on_death: Callable[[int], None]
    on_failed: Callable[[], None]
    on_rested: Callable[[], None]
    on_error: Callable[[Exception], None]


@dataclass(frozen=True, slots=True)
class Birth:
    """Properties of a shell's processes: program, variables beside the session's, first directory, user, cgroup."""

    argv: list[str]
    env: Mapping[str, str]
    cwd: bytes
    identity: UserIdentity
    membership: Membership | None = None
    group: str | None = None


class Shell:
    """Owns the shell process, its link, its state, and its directory (below the private one)."""

    def __init__(self, context: Context, *, directory: str, birth: Birth, events: ShellEvents) -> None:
        self._context = context
        self._config = context.config
        self._birth = birth
        self._is_busybox = is_busybox(birth.argv[0])
        self._events = events
        self.pid: int | None = None
        self.is_ready = False
        self.is_closed = False
        self.is_deaf = False
        """Whether the process ignores the signals of a terminal's end, until the next command restores its own
        traps."""
        self.group = birth.group
        self.cwd = birth.cwd
        self.written_bytes = -1
        """Bytes that the last command wrote to storage, -1 if unknown."""
        self._meter = WriteMeter()
        self.clock = process_set.Clock()
        self._revision = context.settings.revision
        self._revision_before = self._revision
        self._was_ready = False
        self._is_resting = False
        self._failed_starts = 0
        self._start_attempts = 0
        self.failure = _NO_PROCESS
        """Words about the last start for those who get no shell."""
        self._timer: Timer | None = None
        self._checks_left = 0
        self._link: Link | None = None
        self.link_number = command_driver.link_number(birth.argv[0])
        self._owner = birth.identity
        self._state = b""
        self.files = PrivateDirectory(directory, birth.identity.account.uid)
        if self._is_busybox:
            self.files.write("run", command_driver.busybox_text(directory, link=self.link_number).encode())
        if self.is_bash:
            self.files.write("bash", command_driver.bash_text(directory).encode())

    @property
    def identity(self) -> UserIdentity:
        """User of the shell."""
        return self._birth.identity

    @property
    def argv(self) -> list[str]:
        """Arguments that start the shell: the program and, for BusyBox, the applet."""
        return self._birth.argv

    @property
    def path(self) -> str:
        return self._birth.argv[0]

    @property
    def is_bash(self) -> bool:
        """Whether the shell is run by the driver for bash."""
        return self.link_number == command_driver.BASH_LINK

    def start(self) -> None:
        """Start a process; `on_ready` follows. The first gets the environment, later ones the saved state."""
        self.is_ready = self._was_ready = self.is_deaf = False
        cwds = (self.cwd, os.fsencode(self._config.workspace), os.fsencode(self.identity.account.home))
        reads_lines = not self.is_bash
        reports = Reports(on_ready=self._on_started, on_begun=self._events.on_begun, on_end=self._on_end)
        link = None
        try:
            if self._state:
                self.files.unlink("state")
                self.files.write("state", self._state)
            link = Link(self._context.loop, reports, self._events.on_error, reads_lines=reads_lines)
            self.pid = self._spawn(self._environment(), cwds, link.child_fd)
        except OSError as error:  # EAGAIN: the sandbox has as many processes as it may have
            self.failure = f"{_NO_PROCESS}: {os.strerror(error.errno or 0)}"
            if link is not None:
                link.close()
            self._retry_start()
            return
        self._link, self.failure = link, _NO_PROCESS
        link.close_child_side(self.pid)
        self._start_attempts = 0
        self._context.reaper.watch_usage(self.pid, self._on_dead)
        self._set_timer(self._config.start_grace_s, self._on_slow_start)

    def _environment(self) -> dict[str, str]:
        if self._state:
            self._revision = self._revision_before  # the command that brought the latest may not have been saved
            return {}
        self._revision = self._revision_before = self._context.settings.revision
        return {"SHELL": self.path, **self._context.settings.env, **self._birth.env}

    def _spawn(self, env: dict[str, str], cwds: tuple[bytes, ...], link_fd: int) -> int:
        """Start the process. The driver comes in a variable; BusyBox reads it from a pipe that holds all of it."""
        program = command_driver.driver_text(
            self.files.path, self._revision, link=self.link_number, is_busybox=self._is_busybox
        )
        context = self._context
        options: dict[str, Any] = {  # those of `spawn`
            "cwds": cwds,
            "account": self.identity.account,
            "membership": self._birth.membership,
            "rules_fd": context.settings.rules_fd,
            "link": (link_fd, self.link_number),
        }
        self._owner, copy = self.identity, find_unreadable_copy(context.shells_fd, self.path)
        if copy is not None:  # the files of its process below /proc are root's
            self._owner = self.identity.of(ROOT)
            options |= {"file": copy, "shells_fd": context.shells_fd}
        kernel, argv = self._context.kernel, self._birth.argv
        if not self._is_busybox:
            program_text = command_driver.BASH_PROGRAM if self.is_bash else command_driver.PROGRAM
            argv = [*argv, "-c", program_text, os.path.basename(argv[-1])]
            return spawn(kernel, argv, env=env | {command_driver.VARIABLE: program}, **options)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            os.write(write_fd, program.encode())
            return spawn(kernel, [*argv, "-s"], env=env, stdio=(read_fd, 0, 0), **options)
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def _retry_start(self) -> None:
        self._start_attempts += 1
        if self._start_attempts * _START_RETRY_S < self._config.start_grace_s:
            self._set_timer(_START_RETRY_S, self.start)
        else:
            self._start_attempts = 0
            self._events.on_failed()

    def ensure_starting(self) -> None:
        """Start a process if none runs or is coming: the first one, or one more try after starting was given up."""
        if self.pid is None and self._timer is None and not self.is_closed:
            self.start()

    def news(self) -> list[Change]:
        """Return the changes of the session's variables that this shell has not taken over."""
        return self._context.settings.changes_since(self._revision)

    @property
    def has_news(self) -> bool:
        """Whether something must be sourced before the next command: changed variables, or traps to restore."""
        return self.is_deaf or self._revision != self._context.settings.revision

    def hand_over(self, name: str, *, on_terminal: bool, is_heard: bool) -> None:
        """Give the waiting shell its next command, whose files are in place. The shell's reports carry `name`. With
        `is_heard` they are taken as they come, else from `listen` on."""
        assert self._link is not None
        self.is_ready = False
        self.is_deaf = on_terminal
        self._revision_before, self._revision = self._revision, self._context.settings.revision
        self._checks_left = _PICK_UP_CHECKS
        self._link.order(name, is_heard=is_heard)

    def listen(self) -> None:
        """Take the reports on the command that was handed over, now and as they come. To be called soon after
        `hand_over`: a shell that does not begin its command is noticed from then on."""
        if self._link is not None:
            self._link.listen()
            if not self.is_ready and self._timer is None:
                self._wait_for_pick_up()

    def look_away(self) -> None:
        """Take no reports until `listen`."""
        if self._link is not None:
            self._link.look_away()

    def signal(self, number: int) -> None:
        if self.pid is not None:
            process_set.send_signal(self.pid, number)

    def abandon(self) -> None:
        """Ask the shell to leave the command it runs. The caller repeats it until a status comes."""
        self.signal(command_driver.ABANDON_SIGNAL)
        self.signal(signal.SIGCONT)  # afterwards: a stopped shell must not run on before it sees the request

    def replace(self) -> None:
        """Kill the shell; `on_death` and then a new one follow."""
        self.signal(signal.SIGKILL)

    def rest(self) -> None:
        """End a process that waits and was never handed a command, and so has no state. `on_rested` follows;
        `ensure_starting` starts another."""
        if self.is_ready:
            self.is_ready, self._is_resting = False, True
            self.replace()

    def _on_dead(self, status: int, usage: resource.struct_rusage) -> None:
        was_ready, self.pid, self.is_ready = self._was_ready, None, False
        self.written_bytes = self._meter.close(usage.ru_oublock * _BLOCK_BYTES)
        self._cancel_timer()
        if self.is_closed:
            return
        self._drop_link()
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        was_resting, self._is_resting = self._is_resting, False
        if was_resting:
            self._events.on_rested()
            return
        if was_ready:
            self._events.on_death(status)
        if self._failed_starts < _MAX_FAILED_STARTS:
            self.start()
        else:
            self._failed_starts = _MAX_FAILED_STARTS - 1  # one more try whenever a command asks for it
            self._events.on_failed()

    def _on_slow_start(self) -> None:
        self.signal(signal.SIGKILL)

    def _check_picked_up(self) -> None:
        """Replace a shell that does not begin its command. Many short looks, not one long wait, for time passes while a
        sandbox is frozen, too."""
        if self._link is None or self._link.has_begun:
            return
        self._checks_left -= 1
        if self._checks_left > 0:
            self._wait_for_pick_up()
        else:
            self._events.on_unstarted()
            self.replace()

    def _wait_for_pick_up(self) -> None:
        if self._link is not None and not self._link.has_begun:
            self._set_timer(self._config.pick_up_grace_s / _PICK_UP_CHECKS, self._check_picked_up)

    def _on_started(self) -> None:
        self._cancel_timer()
        self._was_ready = self.is_ready = True
        self._failed_starts = 0
        self.files.unlink("state")
        if self.pid is not None:
            set_oom_score(self._owner, self.pid)
        self._look()
        self._events.on_ready()

    def _on_end(self, status: int) -> None:
        self._cancel_timer()
        self.is_ready = self.pid is not None
        self._look()
        self._events.on_status(status)

    def _look(self) -> None:
        """Ask the kernel for the shell's directory and for the bytes that the shell has written."""
        if self.pid is not None:
            self.cwd = process_set.read_directory(self.pid) or self.cwd
            self.written_bytes = self._meter.read(self.pid, self._owner)

    def _drop_link(self) -> None:
        """Take the last reports of a process that is gone, and the state that it has left."""
        if self._link is not None:
            self._link.finish()
            self._state = self._link.state or self._state
            self._link = None

    def retire(self) -> None:
        """Report nothing more and start no process; the caller ends the one that runs."""
        self.is_closed = True
        self.is_ready = False
        self._cancel_timer()

    def close(self) -> None:
        """Give everything up; the process is gone."""
        del self._events  # they refer back, and PID 1 collects no cycles
        if self._link is not None:
            self._link.close()
            self._link = None
        self.clock.close()
        if self._birth.membership is not None:
            os.close(self._birth.membership[1])
        self.files.remove()

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._context.loop.call_later(delay_s, lambda: self._on_timer(callback), self._events.on_error)

    def _on_timer(self, callback: Callable[[], None]) -> None:
        self._timer = None
        callback()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
