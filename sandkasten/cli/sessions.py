"""`sandkasten ps | info | top | rm | pause | resume | extend | network`: sessions, by name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sandkasten.cli.client import (
    BAD_ARGUMENTS,
    FAULT,
    ID,
    SHORT_ID,
    add_client_options,
    add_session,
    find_session,
    verb,
)
from sandkasten.cli.common import Stop, printable_line, span_seconds
from sandkasten.cli.output import (
    labels_text,
    pairs,
    plain,
    print_json,
    print_table,
    since_text,
    size_text,
    span_text,
    table,
    tell,
    write_held,
)

if TYPE_CHECKING:
    from sandkasten.sdk import SandboxClient, Session
    from sandkasten.sdk.types import SessionInfo, SessionStats

_AT_ONCE = 8
"""Requests under way at a time, where a verb makes one for each session."""
NEVER = "never"


def add_ps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="also sessions that have ended and are kept")
    _add_filter(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="whole ids alone")
    add_client_options(parser)
    parser.set_defaults(command=verb(ps))


def _add_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-l", "--label", action="append", default=[], metavar="NAME[=VALUE]", help="only those; all must match"
    )


async def ps(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """List sessions, newest first."""
    found = [each async for each in client.sessions(label=arguments.label, status="all" if arguments.all else None)]
    if arguments.json:
        for each in found:
            print_json(each)
    elif arguments.quiet:
        for each in found:
            if ID.match(each.id):  # a shell may split these, and expand them
                print(each.id)
    else:
        headers = ("ID", "IMAGE", "STATUS", "AGE", "EXPIRES IN", "WORKSPACE", "LABELS")
        print_table(headers, [_row(each) for each in found])
    return 0


def _row(info: SessionInfo) -> Sequence[object]:
    return (
        info.id[:SHORT_ID],
        info.image,
        info.status,
        since_text(info.created_at),
        since_text(info.expires_at) if info.is_live else "",
        info.workspace_id,
        labels_text(info.labels),
    )


# info and top


def add_info(parser: argparse.ArgumentParser) -> None:
    add_session(parser)
    add_client_options(parser)
    parser.set_defaults(command=verb(show_info))


async def show_info(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Show all about a session."""
    from sandkasten import errors

    session = await find_session(client, arguments.session, ended=True)
    info = await session.info()
    try:
        stats = await session.stats()
        runs = [each for each in await session.runs() if each.state != "ended"]
    except (errors.SessionExpired, errors.SessionNotFound):
        stats, runs = None, []
    if arguments.json:
        print_json(plain(info) | {"stats": stats and plain(stats), "runs": [plain(each) for each in runs]})
        return 0
    limits = info.limits
    pairs(
        {
            "id": info.id,
            "image": info.image,
            "status": info.status,
            "reason": info.reason,
            "made": f"{info.created_at} ({since_text(info.created_at)} ago)",
            "ends": _end_text(info),
            "labels": labels_text(info.labels),
            "workspace": info.workspace_id and f"{info.workspace_id} ({info.workspace_mode})",
            "directory": info.cwd,
            "user": info.user,
            "limits": f"{limits.get('cpu')} cpu, {limits.get('memory_mb')} MiB memory, "
            f"{limits.get('disk_mb')} MiB disk, {limits.get('pids')} processes",
            "network": _network_text(info.network),
            "use": stats and _use_text(stats),
        }
    )
    if runs:
        print()
        rows = [(each.exec_id, each.kind, each.state, since_text(each.created_at), each.command) for each in runs]
        print_table(("RUN", "KIND", "STATE", "AGE", "COMMAND"), rows)
    return 0


def _end_text(info: SessionInfo) -> str:
    if info.end_reason is not None:
        return info.end_reason
    if info.expires_at is None:
        return NEVER
    return f"in {since_text(info.expires_at)} unless it is used"


def _network_text(network: Mapping[str, Any]) -> str:
    """Return a session's mode and rules in one line."""
    rules = (f"{name} {' '.join(network[name])}" for name in ("allow", "deny") if network.get(name))
    return "; ".join((str(network.get("mode", "none")), *rules))


def _use_text(stats: SessionStats) -> str:
    memory = f"{size_text(stats.memory_bytes)} of {size_text(stats.memory_limit)} memory"
    disk = "" if stats.disk_bytes is None else f", {size_text(stats.disk_bytes)} disk"
    return f"{memory}{disk}, {stats.pids} processes, {span_text(stats.cpu_usage_usec / 1e6)} of processor time"


def add_top(parser: argparse.ArgumentParser) -> None:
    _add_filter(parser)
    parser.add_argument("-n", "--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (2)")
    parser.add_argument("--once", action="store_true", help="look once; the default where there is no terminal")
    add_client_options(parser)
    parser.set_defaults(command=verb(top))


async def top(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Show what sessions use, the busiest first, again and again until ^C."""
    import anyio

    if not 0.1 <= arguments.interval <= 3600:
        raise Stop("--interval: 0.1 to 3600 seconds", BAD_ARGUMENTS)
    is_live = sys.stdout.isatty() and not arguments.once
    before = await _look(client, arguments.label)
    if arguments.json:
        for info, stats in before.used.values():
            print_json({"id": info.id, "status": info.status} | plain(stats))
        return 0
    wait_s = min(arguments.interval, 0.5)
    if is_live:
        sys.stdout.write("\x1b[2J")
    while True:
        await anyio.sleep(wait_s)
        now = await _look(client, arguments.label)
        _draw(before, now, is_live=is_live)
        await write_held()
        if not is_live:
            return 0
        before, wait_s = now, arguments.interval


class _Look:
    """Use of live sessions at a moment, by their ids."""

    def __init__(self, at: float, used: dict[str, tuple[SessionInfo, SessionStats]]) -> None:
        self.at, self.used = at, used


async def _look(client: SandboxClient, labels: Sequence[str]) -> _Look:
    import anyio

    from sandkasten import errors

    used = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def look(info: SessionInfo) -> None:
        async with limiter:
            try:
                used[info.id] = (info, await client.session(info.id).stats())
            except (errors.SessionExpired, errors.SessionNotFound):
                pass  # it ended meanwhile

    at = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        async for info in client.sessions(label=labels):
            tasks.start_soon(look, info)
    return _Look(at, used)


def _draw(before: _Look, now: _Look, *, is_live: bool) -> None:
    rows = []
    for key, (info, stats) in now.used.items():
        used_us = stats.cpu_usage_usec - before.used.get(key, (info, stats))[1].cpu_usage_usec
        share = 100 * used_us / 1e6 / max(now.at - before.at, 0.001)
        rows.append((share, stats.memory_bytes, _use_row(info, stats, share)))
    rows.sort(key=lambda row: row[:2], reverse=True)
    headers = ("ID", "STATUS", "CPU", "MEMORY", "OF", "DISK", "PIDS", "LABELS")
    lines = table(headers, [row for _, _, row in rows])
    if is_live:
        lines = lines[: max(os.get_terminal_size(sys.stdout.fileno()).lines - 1, 2)]
        sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _use_row(info: SessionInfo, stats: SessionStats, share: float) -> Sequence[object]:
    return (
        info.id[:SHORT_ID],
        info.status,
        f"{share:.0f} %",
        size_text(stats.memory_bytes),
        size_text(stats.memory_limit),
        size_text(stats.disk_bytes),
        stats.pids,
        labels_text(info.labels),
    )


# rm, pause, resume, extend


def add_rm(parser: argparse.ArgumentParser) -> None:
    add_session(parser, nargs="*")
    parser.add_argument("--all", action="store_true", help="all live sessions, or those with the labels; asks first")
    _add_filter(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add_client_options(parser)
    parser.set_defaults(command=verb(rm))


async def rm(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """End sessions."""
    if bool(arguments.session) == arguments.all or (arguments.label and not arguments.all):
        raise Stop("name sessions, or give --all, with -l for those that have a label", BAD_ARGUMENTS)
    if arguments.all:
        found = [each async for each in client.sessions(label=arguments.label)]
        if found and not arguments.yes:
            await _ask(found)
        sessions = [client.session(each.id) for each in found]
    else:
        sessions = [await find_session(client, name) for name in arguments.session]
    return await _each(sessions, arguments, lambda session: session.destroy())


async def _ask(found: Sequence[SessionInfo]) -> None:
    """Have the person confirm the end of sessions. Raises `Stop`."""
    import anyio.to_thread

    if not sys.stdin.isatty():
        raise Stop(f"this would end {len(found)} sessions, and nobody is here to be asked: give --yes", BAD_ARGUMENTS)
    for line in table(("ID", "IMAGE", "STATUS", "AGE", "EXPIRES IN", "WORKSPACE", "LABELS"), map(_row, found)):
        print(line, file=sys.stderr)
    print(f"End {len(found)} sessions? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    if answer.strip().lower() not in ("y", "yes"):
        raise Stop("nothing was ended", FAULT)


async def _each(
    sessions: Sequence[Session], arguments: argparse.Namespace, work: Callable[[Session], Awaitable[object]]
) -> int:
    """Do the same with each session, print its id, and go on after a failure, which is the exit status then."""
    import anyio

    from sandkasten import errors

    limiter = anyio.CapacityLimiter(_AT_ONCE)
    status = 0

    async def one(session: Session) -> None:
        nonlocal status
        async with limiter:
            try:
                done = await work(session)
            except errors.SandkastenAPIError as error:
                status = FAULT
                tell(f"{session.id}: {error.message}")
                return
        if arguments.json:
            print_json(done if done is not None else {"id": session.id, "ok": True})
        else:
            print(printable_line(session.id))
        await write_held()

    async with anyio.create_task_group() as tasks:
        for session in sessions:
            tasks.start_soon(one, session)
    return status


def add_pause(parser: argparse.ArgumentParser) -> None:
    add_session(parser, nargs="+")
    parser.add_argument("--no-auto-resume", action="store_true", help="refuse requests until `sandkasten resume`")
    parser.add_argument("--stop-lease", action="store_true", help="suspend the idle timeout as well")
    add_client_options(parser)
    parser.set_defaults(command=verb(pause))


async def pause(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Freeze the processes of sessions."""
    sessions = [await find_session(client, name) for name in arguments.session]
    options = {"auto_resume": not arguments.no_auto_resume, "stop_lease": arguments.stop_lease}
    return await _each(sessions, arguments, lambda session: session.pause(**options))


def add_resume(parser: argparse.ArgumentParser) -> None:
    add_session(parser, nargs="+")
    add_client_options(parser)
    parser.set_defaults(command=verb(resume))


async def resume(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Let paused sessions go on."""
    sessions = [await find_session(client, name) for name in arguments.session]
    return await _each(sessions, arguments, lambda session: session.resume())


def add_extend(parser: argparse.ArgumentParser) -> None:
    add_session(parser)
    parser.add_argument("span", metavar="SPAN", type=_span_or_never, help="idle timeout: 30m, 12h, 7d, never")
    parser.add_argument("--lifetime", action="store_true", help="change the longest life, from the begin, instead")
    add_client_options(parser)
    parser.set_defaults(command=verb(extend))


def _span_or_never(text: str) -> int | str:
    try:
        return NEVER if text == NEVER else span_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def extend(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Let a session live longer, or shorter."""
    session = await find_session(client, arguments.session)
    seconds = None if arguments.span == NEVER else arguments.span
    if arguments.lifetime:
        info = await session.update(max_lifetime_seconds=seconds)
    else:
        info = await session.update(idle_timeout_seconds=seconds)
    if arguments.json:
        print_json(info)
    else:
        print(printable_line(f"{info.id[:SHORT_ID]} ends {_end_text(info)}"))
    return 0


def add_network(parser: argparse.ArgumentParser) -> None:
    add_session(parser)
    parser.add_argument(
        "--allow", action="append", default=[], metavar="RULE", help="a host, *.suffix, network, @group"
    )
    parser.add_argument("--deny", action="append", default=[], metavar="RULE", help="before what is allowed")
    add_client_options(parser)
    parser.set_defaults(command=verb(change_network))


async def change_network(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Add rules to those of a session's network, and show it."""
    session = await find_session(client, arguments.session)
    if arguments.allow or arguments.deny:
        info = await session.add_rules(allow=arguments.allow, deny=arguments.deny)
    else:
        info = await session.info()
    if arguments.json:
        print_json(info.network)
    else:
        print(printable_line(f"{info.id[:SHORT_ID]} {_network_text(info.network)}"))
    return 0
