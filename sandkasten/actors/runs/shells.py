"""The persistent shells of one session: the default one, which starts with it, and named ones.

Each has a directory, an environment and a process tree of its own and shares files and network with the others. Owns
their names; the runs that wait in each are put there by `Runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from runner.wire import protocol
from sandkasten.actors.runs.groups import Groups
from sandkasten.actors.runs.run import Run
from sandkasten.model import DEFAULT_SHELL, SHELL_NAME, EventType, ShellInfo, ShellSpec
from sandkasten.model.errors import Capacity, Conflict, ExecEnded, InvalidRequest, ShellNotFound

if TYPE_CHECKING:
    from sandkasten.actors.runs.accounting import Reading
    from sandkasten.actors.runs.runs import Host
    from sandkasten.actors.runs.screen import Screen

WORKSPACE_DIR = "/workspace"


@attrs.define(eq=False)
class Shell:
    """One shell. `runs` are its runs in order, the running one first; `screen` shows it to those who watch."""

    name: str
    cwd: str = WORKSPACE_DIR
    group: str | None = None
    runs: list[Run] = attrs.field(factory=list)
    screen: Screen | None = None
    left_at: Reading | None = None
    """What the counters said when its last run ended, if the next one waited."""

    @property
    def info(self) -> ShellInfo:
        return ShellInfo(
            name=self.name,
            cwd=self.cwd,
            running=self.runs[0].info if self.runs else None,
            queued=tuple(run.exec_id for run in self.runs[1:]),
        )


class Shells:
    """See the module's docstring."""

    def __init__(self, host: Host, groups: Groups) -> None:
        self._host = host
        self._groups = groups
        self._shells = {DEFAULT_SHELL: Shell(DEFAULT_SHELL)}
        self._opening: set[str] = set()
        self.preferred = "bash"
        """The program of a shell whose opener names none."""

    def get(self, name: str) -> Shell:
        """Raises `ShellNotFound`."""
        shell = self._shells.get(name)
        if shell is None:
            raise ShellNotFound("the session has no shell of that name", shell=name[:64])
        return shell

    def find(self, name: str) -> Shell | None:
        return self._shells.get(name)

    @property
    def count(self) -> int:
        return len(self._shells) + len(self._opening)

    def infos(self) -> Sequence[ShellInfo]:
        """Return all, the default one first."""
        return [shell.info for shell in self._shells.values()]

    def note_cwd(self, shell: Shell, cwd: str) -> None:
        """A command left the shell in that directory."""
        shell.cwd = cwd
        if shell.name == DEFAULT_SHELL:
            self._host.note_cwd(cwd)

    def adopt(self, hello: protocol.HelloReply) -> None:
        """Take over the shells that PID 1 has, of a sandbox that outlived its daemon perhaps."""
        self.preferred = "bash" if hello.shell.endswith("/bash") else "sh"
        self._shells[DEFAULT_SHELL].cwd = hello.cwd
        for each in hello.shells[: protocol.MAX_SHELLS]:
            if SHELL_NAME.match(each.name):
                shell = self._shells.setdefault(each.name, Shell(each.name))
                shell.cwd, shell.group = each.cwd, shell.group or self._groups.known(each.group)

    async def open(self, spec: ShellSpec) -> ShellInfo:
        """Start a shell. Raises `Conflict`, `Capacity`, `InvalidRequest`."""
        if not SHELL_NAME.match(spec.name):
            raise InvalidRequest(
                "the shell's name is malformed", name="must be 1 to 32 of A-Z, a-z, 0-9, '.', '_', '-'"
            )
        if spec.name in self._shells or spec.name in self._opening:
            raise Conflict("the session has a shell of that name", name=spec.name)
        if len(self._shells) + len(self._opening) >= protocol.MAX_SHELLS:
            raise Capacity("this session has all the shells it may have", max_shells=protocol.MAX_SHELLS)
        self._opening.add(spec.name)
        try:
            shell = await self._start(spec)
        finally:
            self._opening.discard(spec.name)
        self._shells[spec.name] = shell
        self._host.emit(EventType.SHELL_OPENED, shell=spec.name)
        return shell.info

    async def _start(self, spec: ShellSpec) -> Shell:
        group = await self._groups.make()
        try:
            request = protocol.OpenShell(
                name=spec.name,
                shell=spec.shell or self.preferred,
                cwd=spec.cwd,
                env=dict(spec.env),
                user=spec.user,
                group=protocol.Group(group.name, group.membership),
            )
            answer = await self._host.ask_runner(request, protocol.ShellInfo, fd=group.fd.fileno())
        except BaseException:
            self._groups.release(group)
            raise
        group.fd.close()
        return Shell(spec.name, cwd=answer.cwd, group=group.name)

    async def close(self, name: str) -> None:
        """End a shell and all it started. Raises `ShellNotFound`, `InvalidRequest`."""
        if name == DEFAULT_SHELL:
            raise InvalidRequest("the default shell ends with its session", name="is the default shell")
        shell = self.get(name)
        del self._shells[name]
        try:
            await self._host.ask_runner(protocol.CloseShell(name), protocol.Done)
        except ExecEnded:  # PID 1 has none of that name
            pass
        except BaseException:
            self._shells.setdefault(name, shell)
            raise
        if shell.group is not None:
            await self._groups.kill(shell.group)
        if shell.screen is not None:
            shell.screen.close()
        self._host.emit(EventType.SHELL_CLOSED, shell=name)
