"""Programs beside the shells: which ones run, and the meaning of a request to run one in this image.

File, directory and account are looked up with the rights of the user that the program will run as.

Sources: openat2(2) (RESOLVE_NO_MAGICLINKS keeps PID 1's own /proc/self out of reach), environ(7).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from runner.loop.context import Context, Descriptor, Refused, Sink, refuse
from runner.loop.identity import UserAccount, UserIdentity
from runner.loop.kernel import AT_FDCWD, RESOLVE_NO_MAGICLINKS
from runner.loop.settings import check_environment, is_argument
from runner.process import users
from runner.process.spawn import check_group, membership_of
from runner.programs.program import Program, ProgramPlan
from runner.streams import pty
from runner.streams.flow import AbandonedPipes
from runner.wire.protocol import MAX_PROGRAMS, RunProgram

_MAX_TIMEOUT_MS = 2**31
_TERMINAL = "xterm-256color"
_DUMB = "dumb"
_PROMPTS = {"bash": r"\u:\w\$ "}
_PROMPT = "$USER:$PWD$ "

ShellArgv = Callable[[], list[str] | None]
"""Returns the arguments that start the session's shell (absolute path, and for BusyBox the applet), None without
one."""


class Programs:
    """Owns every program until its reply is out."""

    def __init__(self, context: Context, *, shell_argv: ShellArgv) -> None:
        self._context = context
        self._shell_argv = shell_argv
        self._leftovers = AbandonedPipes(context.loop)
        self._programs: set[Program] = set()

    def run(self, request: RunProgram, sink: Sink, descriptor: Descriptor) -> Program:
        """Start a program.

        Raises:
            Refused
        """
        program = Program(self._context, request, sink, self._leftovers, on_over=self._programs.discard)
        try:
            program.begin(self._plan(request, descriptor))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise Refused("IO_ERROR", f"cannot start the program: {reason}") from None
        self._programs.add(program)
        self._context.config.passing("runner.exec.program_started")
        return program

    def _plan(self, request: RunProgram, descriptor: Descriptor) -> ProgramPlan:
        refuse(_check(request))
        if len(self._programs) >= MAX_PROGRAMS:
            raise Refused("TOO_MANY", f"{MAX_PROGRAMS} programs run already")
        account = self._account(request)
        identity = self._context.as_user.of(account)
        cwd = self._directory(request, identity, account)
        file, argv = self._argv(request)
        env = self._environment(request, account, cwd, file)
        return ProgramPlan(file, argv, env, cwd, account, identity, membership_of(request.group, descriptor))

    def _account(self, request: RunProgram) -> UserAccount:
        if request.user is None:
            return self._context.as_user.account
        return users.look_up(self._context, request.user)

    def _directory(self, request: RunProgram, identity: UserIdentity, account: UserAccount) -> bytes:
        """Return the real path of the directory to start in: the wanted one, or else the first of the usual ones that
        there is."""
        workspace = self._context.config.workspace
        wanted = [] if request.cwd is None else [os.path.join(workspace, request.cwd)]
        image = self._context.settings.image_dir
        candidates = wanted or [*([image] if image else []), workspace, account.home, "/"]
        for path in candidates:
            try:
                with identity:
                    return _real_directory(self._context, os.fsencode(path))
            except PermissionError:
                if wanted and account.groups:  # PID 1 can't take on groups; the program has them, and will see
                    return os.path.normpath(os.fsencode(path))
            except OSError:
                continue
        raise Refused("FILE_NOT_FOUND", f"no directory to run in: {candidates[0][:200]}")

    def _argv(self, request: RunProgram) -> tuple[str, list[str]]:
        """Return the file to execute and the arguments, of which the first is the program's name for itself."""
        if request.argv:
            return request.argv[0], list(request.argv)
        shell = self._shell_argv()
        if shell is None:
            raise Refused("NO_SHELL", "the session has no shell: give argv, a program with its arguments")
        options = ["-i"] if request.interactive else ["-c", request.command or ""]
        return shell[0], [os.path.basename(shell[-1]), *options]

    def _environment(self, request: RunProgram, account: UserAccount, cwd: bytes, file: str) -> dict[str, str]:
        env = dict(self._context.settings.env)
        if request.terminal is not None and env.get("TERM", _DUMB) == _DUMB:
            env["TERM"] = _TERMINAL
        if request.interactive:
            env.setdefault("PS1", _PROMPTS.get(os.path.basename(file), _PROMPT))
        if request.user is not None:
            env.update(account.variables)
        if not request.argv:
            env["SHELL"] = file
        env["PWD"] = os.fsdecode(cwd)
        return {**env, **request.env}


def _check(request: RunProgram) -> str | None:
    """Return what is wrong with a request that no image could serve, or None."""
    texts = (*request.argv, request.command or "", request.cwd or "", request.user or "")
    if not all(map(is_argument, texts)):
        return "an argument, directory or user cannot hold a NUL character or a lone surrogate"
    if bool(request.argv) == (request.command is not None):
        return "a program is given by argv or by a command"
    if request.argv and not request.argv[0]:
        return "a program has a name"
    if request.interactive and (request.terminal is None or request.argv or request.command):
        return "an interactive shell takes a terminal and nothing to run"
    if request.timeout_ms is not None and not 0 < request.timeout_ms <= _MAX_TIMEOUT_MS:
        return "timeout_ms is out of range"
    if (problem := check_group(request.group)) is not None:
        return problem
    if request.terminal is not None and (problem := pty.check_size(request.terminal)) is not None:
        return problem
    return check_environment(request.env)


def _real_directory(context: Context, path: bytes) -> bytes:
    """Return the real path of a directory that may be entered.

    Raises:
        OSError: not there, no directory, or not to be entered.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    fd = context.kernel.openat2(AT_FDCWD, path, flags, 0, RESOLVE_NO_MAGICLINKS)
    try:
        os.close(os.open(".", flags, dir_fd=fd))  # a look-up in the directory needs the right to enter it
        if os.fstat(fd).st_nlink == 0:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return os.readlink(b"/proc/self/fd/%d" % fd)
    finally:
        os.close(fd)
