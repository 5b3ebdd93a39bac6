"""The persistent shells of one session: the default one, which starts with the session, and named ones.

Each shell has a directory, an environment and a process tree of its own and shares files, network and process table
with the others: a command can see and, as the same user, signal the processes of another shell.
`Shells` owns the names; `Runs` put runs into the queue of a shell.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.wire import protocol
from sandkasten.actors.runs.cgroups import RunCgroups
from sandkasten.actors.runs.run import Shell
from sandkasten.actors.runs.session_services import SessionServices
from sandkasten.errors import Capacity, Conflict, ExecEnded, InvalidRequest, ShellNotFound
from sandkasten.model import DEFAULT_SHELL, SHELL_NAME, EventType, ShellInfo, ShellSpec


class Shells:
    """See the module's docstring."""

    def __init__(self, host: SessionServices, cgroups: RunCgroups) -> None:
        self._host = host
        self._cgroups = cgroups
        self._shells = {DEFAULT_SHELL: Shell(DEFAULT_SHELL)}
        self._opening: set[str] = set()
        self.preferred = "bash"
        """The program of a shell that is opened without one: `bash` or `sh`."""

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
        """Return all shells, the default one first."""
        return [shell.info for shell in self._shells.values()]

    def note_cwd(self, shell: Shell, cwd: str) -> None:
        """Record that a command left the shell in that directory."""
        if cwd == shell.cwd:
            return
        shell.note_cwd(cwd)
        if shell.name == DEFAULT_SHELL:
            self._host.note_cwd(cwd)

    def adopt(self, hello: protocol.HelloReply) -> None:
        """Take over the shells that PID 1 has; a sandbox that outlived its daemon has named ones."""
        self.preferred = "bash" if hello.shell.endswith("/bash") else "sh"
        self._shells[DEFAULT_SHELL].note_cwd(hello.cwd)
        for each in hello.shells[: protocol.MAX_SHELLS]:
            if SHELL_NAME.match(each.name):
                shell = self._shells.setdefault(each.name, Shell(each.name))
                shell.recover(each.cwd, self._cgroups.known(each.group))

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
        cgroup = await self._cgroups.make()
        try:
            request = protocol.OpenShell(
                name=spec.name,
                shell=spec.shell or self.preferred,
                cwd=spec.cwd,
                env=dict(spec.env),
                user=spec.user,
                group=protocol.BirthCgroup(cgroup.name, cgroup.membership),
            )
            answer = await self._host.ask_runner(request, protocol.ShellInfo, fd=cgroup.fd.fileno())
        except BaseException:
            self._cgroups.release(cgroup)
            raise
        cgroup.fd.close()
        return Shell(spec.name, cwd=answer.cwd, cgroup=cgroup.name)

    async def close(self, name: str) -> Shell:
        """End a shell and all its processes, and return the shell. Raises `ShellNotFound`, `InvalidRequest`."""
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
        if shell.cgroup is not None:
            await self._cgroups.kill(shell.cgroup)
        self._host.emit(EventType.SHELL_CLOSED, shell=name)
        return shell
