"""`sandkasten run | exec | shell | logs`: commands in sessions, with their input, output, signals and exit status.

The words behind `--` are the command. On a terminal (`-t`) the program inside has it until it ends or ^P ^Q detaches;
else standard input, output and error are passed on as bytes, and signals by their names.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sandkasten.cli.client import (
    BAD_ARGUMENTS,
    FAULT,
    INTERRUPTED,
    SHORT_ID,
    TIMED_OUT,
    add_client_options,
    add_session,
    find_session,
    remember,
    verb,
)
from sandkasten.cli.common import Stop, printable_line, span_seconds
from sandkasten.cli.output import print_json, tell, write_held

if TYPE_CHECKING:
    from sandkasten.sdk import Run, SandboxClient, Session
    from sandkasten.sdk.types import RunEnd, RunInfo

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)b?\Z", re.IGNORECASE)
_MEMORY_MB = {"k": 1 / 1024, "": 1, "m": 1, "g": 1024}
_CAUSES = {
    "timed_out": "out of time",
    "cancelled": "cancelled",
    "oom": "killed: out of memory",
    "pids_limit": "the session may have no more processes",
    "disk_full": "the disk is full",
    "shell_died": "the shell died",
    "sandbox_died": "the session's sandbox died",
    "daemon_restarted": "the server was started anew meanwhile",
}
"""Sentences about an end that the command itself did not choose."""
_BEGINS = ("exec.started", "process.started", "terminal.opened")
_ENDED = ("destroyed", "expired", "crashed", "lost")
_SESSION_ENDS = tuple(f"session.{status}" for status in _ENDED)
_MOST_RUNS = 10_000
"""Runs that the server lists at most."""
_LONGEST_LINE = 64 * 1024
_LAST_KEYS_S = 1.0
_END_S = 5.0
"""Time for the end of a run or a session that a verb made."""


# Options that make sessions


def add_create_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a session that a verb makes."""
    made = parser.add_argument_group("session")
    made.add_argument("-v", "--workspace", metavar="ID", help="the workspace at /workspace, made if it is new")
    add_env(made)
    made.add_argument("-l", "--label", action="append", default=[], metavar="NAME=VALUE")
    add_session_bounds(made)
    made.add_argument(
        "-p",
        "--publish",
        action="append",
        default=[],
        metavar="[LOCAL:]REMOTE",
        help="let a port of the server's machine lead to one inside, for a day at most",
    )
    made.add_argument("--idle", type=_span, metavar="SPAN", help="end of a session that nobody uses: 90s, 30m, 12h, 7d")
    made.add_argument("--keep", action="store_true", help="leave the session when the command has ended")
    made.add_argument("--rm", action="store_true", help=argparse.SUPPRESS)  # docker's habit, and the default here


def add_session_bounds(parser: argparse._ActionsContainer) -> None:
    """Add the options that bound a session: processors, memory, network."""
    parser.add_argument("--cpus", type=float, metavar="CORES")
    parser.add_argument("-m", "--memory", type=memory_mb, metavar="SIZE", help="512m, 2g")
    parser.add_argument("--network", metavar="MODE", help="none, allow (what --allow names), ask, open, bridge")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="RULE", help="a host, *.suffix, network, @group"
    )
    parser.add_argument("--deny", action="append", default=[], metavar="RULE", help="before what is allowed")
    parser.add_argument("--proxy-env", action="store_true", help="name the network's proxy in the environment")


def add_env(parser: argparse._ActionsContainer) -> None:
    """Add the option that gives variables."""
    parser.add_argument("-e", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="no value: ours")


def memory_mb(text: str) -> int:
    """Return the MiB of a size such as `512m` or `2g`; a bare number is of MiB."""
    match = _MEMORY.match(text)
    if match is None or (mb := round(float(match[1]) * _MEMORY_MB[match[2].lower()])) < 1:
        raise argparse.ArgumentTypeError("a size such as 512m or 2g")
    return mb


def _span(text: str) -> int:
    try:
        return span_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def env_of(given: Sequence[str]) -> dict[str, str]:
    """Return variables out of `NAME=VALUE` and of `NAME`, which takes ours."""
    pairs = (each.partition("=") for each in given)
    return {name: value if sign else os.environ.get(name, "") for name, sign, value in pairs}


def labels_of(given: Sequence[str]) -> dict[str, str]:
    """Return labels out of `NAME=VALUE`. Raises `Stop`."""
    if wrong := [each for each in given if "=" not in each]:
        raise Stop(f"a label is NAME=VALUE, not {printable_line(wrong[0])!r}", BAD_ARGUMENTS)
    return {name: value for name, _, value in (each.partition("=") for each in given)}


def port_pair(text: str) -> tuple[int, int]:
    """Return the local and the remote port; 0 is any free one. Raises `Stop`."""
    local, colon, remote = text.rpartition(":")
    try:
        ports = int(local) if colon else int(remote), int(remote)
        if not (0 <= ports[0] <= 0xFFFF and 0 < ports[1] <= 0xFFFF):
            raise ValueError
    except ValueError:
        raise Stop(f"{printable_line(text)!r} is no [LOCAL:]REMOTE pair of ports", BAD_ARGUMENTS) from None
    return ports


def network_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the network that the options of a new session ask for; empty for the server's default."""
    mode = arguments.network or ("allow" if arguments.allow else None)
    given = {"mode": mode, "allow": arguments.allow, "deny": arguments.deny, "proxy_env": arguments.proxy_env}
    return {name: value for name, value in given.items() if value}


async def create(client: SandboxClient, arguments: argparse.Namespace) -> Session:
    """Make the session that the options of `add_create_options` describe."""
    limits = {"cpu": arguments.cpus, "memory_mb": arguments.memory}
    given: dict[str, Any] = {
        "workspace_id": arguments.workspace,
        "env": env_of(arguments.env),
        "labels": labels_of(arguments.label),
        "limits": {name: value for name, value in limits.items() if value is not None},
        "idle_timeout_seconds": arguments.idle,
        "network": network_of(arguments),
        "publish": [{"port": remote, "host_port": local} for local, remote in map(port_pair, arguments.publish)],
    }
    return await client.create_session(image=arguments.image, **{name: each for name, each in given.items() if each})


@contextlib.asynccontextmanager
async def passing(client: SandboxClient, arguments: argparse.Namespace) -> AsyncIterator[_Passing]:
    """Make a session that ends with the block, unless it is to stay. Its published ports end with the session."""
    stays = _Passing(await create(client, arguments), arguments.keep)
    try:
        if arguments.publish:
            for each in (await stays.session.info()).published:
                tell(f"port {each['host_port']} of the server's machine leads to port {each['port']}")
        yield stays
    finally:
        if stays.stays:
            remember(client, stays.session.id)
            if stays.is_told:
                tell(f"session {stays.session.id} goes on")
        else:
            import anyio

            with anyio.move_on_after(_END_S, shield=True):
                await stays.session.destroy()


class _Passing:
    """A session that a verb made; `stays`: it is left when the verb ends, and `is_told`: the person is told so."""

    def __init__(self, session: Session, stays: bool) -> None:
        self.session, self.stays, self.is_told = session, stays, True


# run and exec


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sandkasten run [-it] [-d] [OPTION…] [IMAGE] [-- COMMAND [ARGUMENT…]]"
    parser.add_argument("image", nargs="?", metavar="IMAGE", help="by default the server's")
    parser.add_argument("-d", "--detach", action="store_true", help="leave the command running, print the session's id")
    _add_command_options(parser)
    add_create_options(parser)
    add_client_options(parser)
    parser.set_defaults(command=verb(run))


def add_exec(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sandkasten exec [-it] [OPTION…] SESSION -- COMMAND [ARGUMENT…]"
    add_session(parser)
    parser.add_argument("--stateless", action="store_true", help="in a shell of its own beside the persistent one")
    parser.add_argument("--shell", metavar="NAME", help="another persistent shell of the session")
    parser.add_argument("-d", "--detach", action="store_true", help="run in the background, and print the run's id")
    add_env(parser)
    _add_command_options(parser)
    add_client_options(parser)
    parser.set_defaults(command=verb(execute))


def _add_command_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--interactive", action="store_true", help="pass standard input even if it is a terminal")
    parser.add_argument("-n", "--no-stdin", action="store_true", help="pass no standard input, whatever it is")
    parser.add_argument("-t", "--tty", action="store_true", help="give the command this terminal; ^P ^Q detaches")
    parser.add_argument("-u", "--user", metavar="USER", help="user inside, such as root")
    parser.add_argument("-w", "--workdir", metavar="DIR", help="directory inside")
    parser.add_argument("--timeout", type=_span, metavar="SPAN", help="time limit, then exit status 124: 90s, 30m, 2h")


async def run(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Run a command in a session of its own."""
    words = _words(arguments, needed=arguments.image is None and not arguments.detach)
    if not words and not arguments.detach:
        words = await _command_of_image(client, arguments.image)
    options: dict[str, Any] = {"user": arguments.user, "cwd": arguments.workdir}
    if arguments.detach:
        _refuse("with -d", {"-t": arguments.tty})
        if not words:
            _refuse("without a command", {"--timeout": arguments.timeout})
        async with passing(client, arguments) as made:
            if words:
                await _leave(made.session, words, arguments, **options)
            made.stays, made.is_told = True, False
        return _print_id(arguments, "id", made.session.id)
    tty = _terminal_size(arguments)
    async with passing(client, arguments) as made:
        session = made.session
        if arguments.json:
            return await _print_result(session, words, arguments, **options)
        options |= {"tty": tty, "merged": _is_one_output(), "raw": True}
        if arguments.timeout:
            began = session.start(words, timeout_ms=arguments.timeout * 1000, stdin=True, **options)
        else:
            began = await session.process(words, **options)
        status = await _conduct(began, arguments, has_terminal=tty is not None, has_input=True)
        if status is None:
            made.stays = True
            tell(f"detached; `sandkasten logs -f {session.id}` follows")
        return status or 0


async def execute(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Run a command in a session's persistent shell."""
    words = _words(arguments, needed=True)
    # One word is a script; of several each is an argument, whatever signs it has.
    script = words[0] if len(words) == 1 else shlex.join(words)
    if arguments.detach:
        _refuse("with -d", {"-t": arguments.tty, "--shell": arguments.shell})
    tty = _terminal_size(arguments)
    session = await find_session(client, arguments.session)
    options: dict[str, Any] = {"user": arguments.user, "cwd": arguments.workdir, "env": env_of(arguments.env) or None}
    if arguments.detach:
        began = await _leave(session, script, arguments, **options)
        return _print_id(arguments, "exec_id", began.id)
    options |= {"shell": arguments.shell, "stateless": True if arguments.stateless or arguments.user else None}
    if arguments.json:
        return await _print_result(session, script, arguments, **options)
    has_input = tty is not None or _passes_input(arguments)
    options |= {"tty": tty, "merged": _is_one_output(), "raw": True}
    if tty is None or arguments.timeout or arguments.shell:
        began = session.start(script, timeout_ms=(arguments.timeout or 0) * 1000, stdin=has_input, **options)
    else:  # nobody sits at a terminal with a time limit, which commands of shells have
        del options["shell"], options["stateless"]
        began = await session.process(script, **options)
    status = await _conduct(began, arguments, has_terminal=tty is not None, has_input=has_input)
    if status is None:
        tell(f"detached; `sandkasten logs -f {session.id} {began.id}` follows")
    return status or 0


async def _leave(
    session: Session,
    command: str | list[str],
    arguments: argparse.Namespace,
    **options: Any,  # of Session.process
) -> Run:
    """Start a command that is left running. Its input is open with -i, for others to send."""
    limit_ms = arguments.timeout and arguments.timeout * 1000
    return await session.process(command, keep_alive=True, timeout_ms=limit_ms, stdin=arguments.interactive, **options)


def _refuse(where: str, options: dict[str, object]) -> None:
    """Raise `Stop` for an option that has a value."""
    for name in filter(options.get, options):
        raise Stop(f"there is no {name} {where}", BAD_ARGUMENTS)


def _words(arguments: argparse.Namespace, *, needed: bool) -> list[str]:
    if needed and not arguments.words:
        raise Stop("the command comes behind --, as in: sandkasten run -- python3 -c 'print(42)'", BAD_ARGUMENTS)
    return list(arguments.words)


async def _command_of_image(client: SandboxClient, name: str) -> list[str]:
    """Return the command that an image has. Raises `Stop`: none."""
    config = (await client.get_image(name)).config
    if not (words := [*config.get("entrypoint", ()), *config.get("cmd", ())]):
        raise Stop(f"image {printable_line(name)!r} has no command of its own: give one behind --", BAD_ARGUMENTS)
    return words


def _print_id(arguments: argparse.Namespace, name: str, value: str) -> int:
    if arguments.json:
        print_json({name: value})
    else:
        print(printable_line(value))
    return 0


def _terminal_size(arguments: argparse.Namespace) -> tuple[int, int] | None:
    if not arguments.tty:
        return None
    from sandkasten.cli import terminal

    terminal.require_terminal()
    return terminal.size()


def _passes_input(arguments: argparse.Namespace) -> bool:
    return not arguments.no_stdin and (arguments.interactive or not os.isatty(0))


def _is_one_output() -> bool:
    """Return whether standard output and error are one file: then their order is worth more than their difference."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:
        return False


async def _print_result(
    session: Session,
    command: str | list[str],
    arguments: argparse.Namespace,
    **options: Any,  # of Session.exec
) -> int:
    stdin = await _input_text() if _passes_input(arguments) else None
    timeout_ms = (arguments.timeout or 0) * 1000
    result = await session.exec(
        command, timeout_ms=timeout_ms, stdin=stdin, separate=True, on_timeout="result", **options
    )
    print_json(result)
    return _status(result)


async def _input_text() -> str:
    """Return all of standard input. Raises `Stop` if that is no text, which is what a request has room for."""
    from sandkasten.cli.terminal import IN, read_some

    data = bytearray()
    while piece := await read_some(IN):
        data += piece
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Stop("with --json standard input must be UTF-8: leave out --json, or -n passes none", FAULT) from None


async def _conduct(run: Run, arguments: argparse.Namespace, *, has_terminal: bool, has_input: bool) -> int | None:
    """Connect a run with the terminal, or with standard input and output, and return its exit status; None: detached.

    Kills the run if it goes on and the person has not detached.
    """
    how: int | None = 0
    is_left = True
    try:
        async with run:
            how = await (_on_terminal(run) if has_terminal else _on_pipes(run, arguments, has_input=has_input))
            if how is None:
                run.detach()
            is_left = how is not None and run.end is None
    finally:
        if is_left:
            await kill(run)
    return how if run.end is None else _said(run.end)


async def kill(run: Run) -> None:
    """End a run that is left, within a bounded time and whatever happens."""
    import anyio

    from sandkasten import errors

    with anyio.move_on_after(_END_S, shield=True), contextlib.suppress(errors.SandkastenError):
        await run.cancel(now=True)


def _said(end: RunEnd) -> int:
    """Say why a command ended if it did not choose to, and return its exit status."""
    if end.cause in _CAUSES:
        span = f" after {end.timeout_ms / 1000:g} s" if end.cause == "timed_out" and end.timeout_ms else ""
        victim = f" ({printable_line(end.victim)})" if end.victim else ""
        tell(f"{_CAUSES[end.cause]}{span}{victim}")
    return _status(end)


def _status(end: Any) -> int:  # RunEnd or ExecResult
    return TIMED_OUT if end.timed_out else int(end.exit_code) & 0xFF


async def _on_terminal(run: Run) -> int | None:
    from sandkasten.cli.terminal import DETACHED, RawTerminal, attach

    with RawTerminal() as terminal:
        how = await attach(terminal, _bytes_of(run), _sender(run), _resizer(run))
    return None if how == DETACHED else how


async def _bytes_of(run: Run) -> AsyncIterator[bytes]:
    async for piece in run:
        yield piece.data  # type: ignore[misc]  # the run is raw


def _sender(run: Run) -> Callable[[bytes], Awaitable[None]]:
    from sandkasten import errors

    async def send(data: bytes) -> None:
        with contextlib.suppress(errors.ExecEnded):
            await run.send(data)

    return send


def _resizer(run: Run) -> Callable[[int, int], Awaitable[None]]:
    from sandkasten import errors

    async def resize(cols: int, rows: int) -> None:
        with contextlib.suppress(errors.ExecEnded, errors.Conflict):  # it ended, or waits for its shell
            await run.resize(cols, rows)

    return resize


async def _on_pipes(run: Run, arguments: argparse.Namespace, *, has_input: bool) -> int:
    import anyio

    from sandkasten import errors
    from sandkasten.cli.terminal import ERR, IN, OUT, forward_signals, read_some, write_all

    outcome = 0

    async with anyio.create_task_group() as tasks:

        async def feed() -> None:
            with contextlib.suppress(errors.ExecEnded):
                if _passes_input(arguments):
                    while data := await read_some(IN):
                        await run.send(data)
                await run.close_input()

        async def signal(name: str) -> None:
            with contextlib.suppress(errors.ExecEnded, errors.ConnectionFailed, errors.Uncertain):
                try:
                    await run.signal(name)
                except errors.Conflict:  # it waits for its shell, and so can only be given up
                    give_up(INTERRUPTED)

        def give_up(status: int) -> None:
            nonlocal outcome
            outcome = status
            tasks.cancel_scope.cancel()

        if has_input:
            tasks.start_soon(feed)
        tasks.start_soon(forward_signals, signal, give_up)
        async for piece in run:
            await write_all(ERR if piece.stream == "stderr" else OUT, piece.data)  # type: ignore[arg-type]  # raw
        tasks.cancel_scope.cancel()
    return outcome


# shell


def add_shell(parser: argparse.ArgumentParser) -> None:
    add_session(parser, nargs="?")
    parser.add_argument("--image", metavar="IMAGE", help="of the session that is made without SESSION")
    look = parser.add_mutually_exclusive_group()
    look.add_argument("--watch", action="store_true", help="look at the persistent shell, where an agent works")
    look.add_argument("--take-over", action="store_true", help="type into that shell; commands wait meanwhile")
    look.add_argument("--join", metavar="TERMINAL", help="another view of an open terminal, such as one that was left")
    parser.add_argument("--shell", metavar="NAME", default="default", help="the persistent shell to watch or take over")
    parser.add_argument("-u", "--user", metavar="USER", help="user inside, such as root")
    parser.add_argument("-w", "--workdir", metavar="DIR", help="directory inside")
    add_create_options(parser)
    add_client_options(parser, json=False)
    parser.set_defaults(command=verb(shell))


async def shell(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Give the person a shell in a session; without one, in a new session."""
    from sandkasten.cli.terminal import require_terminal

    require_terminal()
    if arguments.session is not None:
        session = await find_session(client, arguments.session)
        return await _shell_in(session, arguments) or 0
    async with passing(client, arguments) as made:
        status = await _shell_in(made.session, arguments)
        made.stays |= status is None
        return status or 0


async def _shell_in(session: Session, arguments: argparse.Namespace) -> int | None:
    """Return the exit status of the shell; None: detached."""
    import anyio

    from sandkasten import errors
    from sandkasten.cli.terminal import DETACHED, RawTerminal, attach, size

    cols, rows = size()
    views = arguments.watch or arguments.take_over
    options = {"user": arguments.user, "cwd": arguments.workdir}
    if views or arguments.join:
        options = {"shell": arguments.shell} if views else {"terminal_id": arguments.join}
    opened = session.terminal(cols=cols, rows=rows, read_only=arguments.watch, take_over=arguments.take_over, **options)
    async with opened as inside:

        async def resize(cols: int, rows: int) -> None:
            if not arguments.watch:  # who only looks changes nothing, and the size is that of all viewers
                await inside.resize(cols, rows)

        with RawTerminal() as terminal:
            if views or arguments.join:
                await resize(cols, rows)
            how = await attach(terminal, inside, inside.send, resize)
        if how == DETACHED and not arguments.watch:
            # Answered, or refused, behind what was typed, which would be dropped where the viewer leaves at once.
            with anyio.move_on_after(_LAST_KEYS_S), contextlib.suppress(errors.SandkastenError):
                await inside.give_back()
    if inside.skipped:
        tell(f"{inside.skipped} bytes of output were too fast for this terminal")
    if how == DETACHED:
        again = "" if views else f"; `sandkasten shell {session.id} --join {inside.id}` returns"
        tell(f"detached{again}")
        return None
    if inside.end is None and not (views or arguments.join):  # as a terminal that is closed ends its shell
        await kill(session.run(inside.id))
    return how if inside.end is None else _status(inside.end)


# logs


def add_logs(parser: argparse.ArgumentParser) -> None:
    add_session(parser)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the beginning of a run's id; by default all runs")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes, new runs included")
    parser.add_argument("--since", type=_span, metavar="SPAN", help="only runs that were alive in the last 30m, 12h, …")
    parser.add_argument("--raw", action="store_true", help="obey escape sequences of the output on a terminal")
    add_client_options(parser)
    parser.set_defaults(command=verb(logs))


async def logs(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Print the kept output of runs; of several, each line behind the id of its run."""
    session = await find_session(client, arguments.session, ended=True)
    infos = [each for each in await _runs(session, arguments.run) if _is_wanted(each, arguments)]
    if arguments.run is not None and len(infos) != 1:
        raise Stop(
            f"{len(infos)} kept runs fit {printable_line(arguments.run)!r}: give another beginning of an id", FAULT
        )
    is_one = arguments.run is not None
    printers = {each.exec_id: _Printer(arguments, each.exec_id, is_one) for each in infos}
    if not arguments.follow:
        for info in infos:
            await _print_kept(session, printers[info.exec_id])
        return 0

    import anyio

    async with anyio.create_task_group() as tasks:
        for info in infos:
            tasks.start_soon(_follow, session, printers[info.exec_id])
        if not is_one:
            async for exec_id in _new_runs(session, arguments):
                if exec_id not in printers:
                    printers[exec_id] = _Printer(arguments, exec_id, is_one)
                    tasks.start_soon(_follow, session, printers[exec_id])
    return 0


async def _runs(session: Session, exec_id: str | None) -> list[RunInfo]:
    """Return the run of that id, if there is one, else all runs that the server lists."""
    from sandkasten import errors

    if exec_id is not None:
        with contextlib.suppress(errors.ExecNotFound, errors.ExecGone, errors.InvalidRequest):
            return [await session.run(exec_id).info()]
    return await session.runs(limit=_MOST_RUNS)


async def _new_runs(session: Session, arguments: argparse.Namespace) -> AsyncIterator[str]:
    """Yield the ids of runs that are there, and of those that begin, until the session ends."""
    async with session.watch_events(types=[*_BEGINS, *_SESSION_ENDS]) as events:
        for each in await _runs(session, None):  # also what began behind an earlier list, and has ended by now
            if _is_wanted(each, arguments):
                yield each.exec_id
        if (await session.info()).status in _ENDED:
            return
        async for event in events:
            if event.type in _SESSION_ENDS:
                return
            yield str(event.data["exec_id"])


def _is_wanted(info: RunInfo, arguments: argparse.Namespace) -> bool:
    if arguments.run is not None:
        return info.exec_id.startswith(arguments.run)
    if arguments.since is None or info.ended_at is None:
        return True
    return datetime.fromisoformat(info.ended_at) >= datetime.now(UTC) - timedelta(seconds=arguments.since)


async def _print_kept(session: Session, printer: _Printer) -> None:
    offset = 0
    while True:
        part = await session.run(printer.run).output(offset=offset)
        await printer.feed(part.data)
        offset = part.next_offset
        if not part.data or offset >= part.total_bytes:
            break
    await printer.close()


async def _follow(session: Session, printer: _Printer) -> None:
    async for piece in session.run(printer.run, raw=True):
        await printer.feed(piece.data)  # type: ignore[arg-type]  # raw
    await printer.close()


class _Printer:
    """Output of one run, printed as lines behind its id, as JSON, or as it is if it is alone."""

    def __init__(self, arguments: argparse.Namespace, run: str, is_alone: bool) -> None:
        self.run = run
        self._is_json = arguments.json
        self._is_shown = sys.stdout.isatty() and not arguments.raw
        self._is_whole = is_alone and not (self._is_json or self._is_shown)
        self._prefix = "" if is_alone else f"{printable_line(run)[:SHORT_ID]} | "
        self._rest = b""

    async def feed(self, data: bytes) -> None:
        """Print the lines that a piece of output completes."""
        if self._is_whole:
            sys.stdout.buffer.write(data)
            await write_held()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._print(line)
        await write_held()

    async def close(self) -> None:
        """Print what is left of an unfinished line."""
        if self._rest:
            self._print(self._rest)
        self._rest = b""
        await write_held()

    def _print(self, line: bytes) -> None:
        if self._is_json:
            text = json.dumps({"exec_id": self.run, "line": line.decode("utf-8", "replace")})
            sys.stdout.buffer.write(text.encode() + b"\n")
        elif self._is_shown:
            text = self._prefix + printable_line(line.decode("utf-8", "replace").removesuffix("\r")) + "\n"
            sys.stdout.buffer.write(text.encode(sys.stdout.encoding, "backslashreplace"))
        else:
            sys.stdout.buffer.write(self._prefix.encode() + line + b"\n")
