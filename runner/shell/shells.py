"""The persistent shells of a sandbox, by name. Each has a queue, a directory below the private one, and a cgroup if
it was given one.

A command goes to the queue of its shell. Names never become paths: directories are numbered.

Sources: `runner.wire.protocol` says what each request means.
"""

from __future__ import annotations

import os

from runner.loop import settings
from runner.loop.context import Context, Descriptor, Refused, Sink, refuse
from runner.loop.identity import UserIdentity
from runner.process import users
from runner.process.spawn import check_group, membership_of
from runner.shell import filerules
from runner.shell.execution import Execution
from runner.shell.queue import CommandQueue, check_request, may_enter
from runner.shell.shell import Birth, find_shell
from runner.streams.flow import AbandonedPipes
from runner.wire.protocol import (
    DEFAULT_SHELL,
    MAX_SHELLS,
    PROTOCOL_VERSION,
    WITHOUT_SHELL,
    CloseShell,
    Done,
    Exec,
    FileRules,
    HelloReply,
    OpenShell,
    Setup,
    ShellInfo,
)

_MAX_NAME_LENGTH = 64


_NO_SHELL = "the image has no shell, as images called distroless or scratch: give argv, a program with its arguments"


class Shells:
    """Owns the queues, one for each shell."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._leftovers = AbandonedPipes(context.loop)
        self._queues: dict[str, CommandQueue] = {}
        self._opened = 0
        self._is_set_up = False

    def argv(self) -> list[str] | None:
        """Return how the default shell is started, None before `set_up` and in an image without a shell."""
        queue = self._queues.get(DEFAULT_SHELL)
        return None if queue is None else list(queue.shell.argv)

    def pids(self) -> frozenset[int]:
        """Return the pids of the shells that run now."""
        pids = (queue.shell.pid for queue in self._queues.values())
        return frozenset(pid for pid in pids if pid is not None)

    def hello(self) -> HelloReply:
        """Return the shells there are, and their directories."""
        infos = [self._info(name, queue) for name, queue in self._queues.items() if not queue.shell.is_closed]
        default = next((info for info in infos if info.name == DEFAULT_SHELL), None)
        others = tuple(info for info in infos if info is not default)
        has_changes = self._context.settings.has_changes
        if default is None:
            shell = WITHOUT_SHELL if self._is_set_up else ""
            return HelloReply(shell, self._context.config.workspace, others, PROTOCOL_VERSION, has_changes)
        return HelloReply(default.path, default.cwd, others, PROTOCOL_VERSION, has_changes)

    @staticmethod
    def _info(name: str, queue: CommandQueue) -> ShellInfo:
        return ShellInfo(name, queue.shell.path, os.fsdecode(queue.shell.cwd), queue.shell.group or "")

    def set_up(self, request: Setup) -> HelloReply:
        """Start the default shell, unless there is one; an image without a shell has programs alone.

        Raises:
            Refused
        """
        if request.version != PROTOCOL_VERSION:
            raise Refused("BAD_REQUEST", f"protocol version {PROTOCOL_VERSION} is spoken here")
        if any(not _can_be_set(name, value) for name, value in request.env.items()):
            raise Refused("BAD_REQUEST", "env holds an impossible name or value")
        if DEFAULT_SHELL not in self._queues:
            self._apply(request)
            unused_s = None if request.unused_shell_ms is None else max(0, request.unused_shell_ms) / 1000
            cwd = request.cwd if may_enter(self._context, self._context.as_user, request.cwd) else None
            if find_shell(request.shell) is not None:
                self._new_queue(OpenShell(DEFAULT_SHELL, request.shell, cwd=cwd), Descriptor(), unused_s)
            self._is_set_up = True
            self._context.config.passing("runner.create.set_up")
        return self.hello()

    def _apply(self, request: Setup) -> None:
        """Take over the settings of every run: user, file rules, graces, variables."""
        context = self._context
        account = context.as_user.account = self._identity(request).account
        if request.files is not None:
            context.settings.rules_fd = self._file_rules(request.files)
        context.settings.image_dir = request.cwd
        context.settings.set_graces(request.graces)
        context.settings.env.update({**account.variables, **request.env})

    def _identity(self, request: Setup | OpenShell) -> UserIdentity:
        if request.user is None:
            return self._context.as_user
        return self._context.as_user.of(users.look_up(self._context, request.user))

    def _file_rules(self, rules: FileRules) -> int:
        problem = filerules.check(rules)
        if problem is not None:
            raise Refused("INVALID_PATH", problem)
        return filerules.make(self._context, rules)

    def open(self, request: OpenShell, descriptor: Descriptor) -> ShellInfo:
        """Start one more shell.

        Raises:
            Refused
        """
        refuse(_check(request))
        return self._info(request.name, self._new_queue(request, descriptor))

    def _new_queue(self, request: OpenShell, descriptor: Descriptor, unused_s: float | None = None) -> CommandQueue:
        if request.name in self._queues:
            raise Refused("EXISTS", f"there is a shell {request.name!r}")
        if len(self._queues) >= MAX_SHELLS:
            raise Refused("TOO_MANY", f"a sandbox has at most {MAX_SHELLS} shells")
        argv = find_shell(request.shell)
        if argv is None:
            raise Refused("NO_SHELL", _NO_SHELL)
        workspace = self._context.config.workspace
        identity = self._identity(request)
        if not may_enter(self._context, identity, request.cwd):
            raise Refused("FILE_NOT_FOUND", f"no directory to start in: {request.cwd}")
        cwd = os.fsencode(os.path.normpath(os.path.join(workspace, request.cwd or "")))
        self._opened += 1
        directory = f"{self._context.config.private_dir}/{self._opened}"
        group = request.group.name if request.group is not None else None
        membership = membership_of(request.group, descriptor)
        env = request.env if request.user is None else {**identity.account.variables, **request.env}
        birth = Birth(argv, env, cwd, identity, membership, group)
        try:
            queue = CommandQueue(self._context, self._leftovers, directory=directory, birth=birth, unused_s=unused_s)
        except OSError as error:
            raise Refused("SHELL_FAILED", f"cannot make a shell: {os.strerror(error.errno or 0)}") from error
        if membership is not None:
            descriptor.take()  # the shell's from now on
        self._queues[request.name] = queue
        return queue

    def close(self, request: CloseShell, sink: Sink) -> None:
        """Kill a shell, and answer when no process of it is left.

        Raises:
            Refused
        """
        queue = self._queues.get(request.name)
        if request.name == DEFAULT_SHELL:
            raise Refused("BAD_REQUEST", "the default shell stays")
        if queue is None or queue.shell.is_closed:
            raise Refused("NOT_RUNNING", f"no shell {request.name!r}")
        queue.close(lambda: self._on_closed(request.name, sink))

    def _on_closed(self, name: str, sink: Sink) -> None:
        del self._queues[name]
        sink.finish(Done())

    def submit(self, request: Exec, sink: Sink) -> Execution:
        """Queue a command.

        Raises:
            Refused
        """
        queue = self._queues.get(request.shell)
        if queue is None or queue.shell.is_closed:
            if request.shell == DEFAULT_SHELL and self._is_set_up and queue is None:
                raise Refused("NO_SHELL", _NO_SHELL)
            if request.shell == DEFAULT_SHELL:
                raise Refused("BAD_REQUEST", "no shell was set up")
            raise Refused("NO_SUCH_SHELL", f"no shell {request.shell!r}")
        refuse(check_request(request))
        self._context.config.passing("runner.exec.accepted")
        return queue.submit(request, sink)


def _can_be_set(name: str, value: str) -> bool:
    return name != "" and "=" not in name and not settings.is_own(name) and settings.is_argument(name + value)


def _check(request: OpenShell) -> str | None:
    if not 0 < len(request.name) <= _MAX_NAME_LENGTH:
        return f"a shell's name has 1 to {_MAX_NAME_LENGTH} characters"
    if not settings.is_argument(request.shell + (request.cwd or "") + (request.user or "")):
        return "a shell, directory or user cannot hold a NUL character or a lone surrogate"
    return check_group(request.group) or settings.check_environment(request.env)
