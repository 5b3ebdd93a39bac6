"""Foundation of client verbs: the server, a client of the SDK, sessions by name, and failures as sentences.

A client verb is a coroutine that gets its arguments and a client, and returns its exit status; `verb` makes a command
of the coroutine. A fault of ours or the server's is 125, an interrupt 130. The SDK is imported when a verb runs, so
that help and mistakes cost nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sandkasten.cli.common import Stop, printable_line
from sandkasten.contexts import LOCAL, Server, choose_server, chosen_context, own_directory
from sandkasten.installation import ConfigError

if TYPE_CHECKING:
    from sandkasten.sdk import SandboxClient, Session

FAULT = 125
"""Exit status of a fault that is ours or the server's; the command inside did not say it (docker-run(1))."""
BAD_ARGUMENTS = 2
TIMED_OUT = 124
INTERRUPTED = 130

T = TypeVar("T")
ClientVerb = Callable[[argparse.Namespace, "SandboxClient"], Awaitable[int]]

ID = re.compile(r"[0-9a-f]{24}\Z")
"""A session's id as our servers make them; what another server answers as one may be anything."""
SHORT_ID = 12
"""Characters of an id in tables: half of it, and enough among a million."""
_BEGINNING = re.compile(r"[0-9a-f]{1,23}\Z")
LAST = "-"
"""The name of the session used last."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a verb in good order. SIGQUIT ends it at once, but while a command has it."""
_END_S = 15.0
"""Time for the end of a verb after a signal: more than the end of a run and of its session take."""
_KEPT_LAST = 32
_SHOWN_MATCHES = 4
_PATIENCE_S = 30.0
"""Time for a lost connection to come back; a node without room is waited for if that is advised for a shorter time."""
_NEEDLESS = ("trio", "h2")
"""Packages that httpcore2 imports wherever they are installed, which takes 100 ms: this process has neither use."""
_ADVICE = {
    "UNAUTHORIZED": "give the server's key by `sandkasten context add`, or in SANDKASTEN_API_KEY",
    "FORBIDDEN": "this needs a key with more rights",
    "SESSION_NOT_FOUND": "`sandkasten ps -a` lists sessions",
    "SESSION_EXPIRED": "`sandkasten run` makes another",
    "INVALID_IMAGE": "`sandkasten image list` shows images",
    "CAPACITY": "`sandkasten ps` shows who uses the node; try again later",
    "QUOTA_EXCEEDED": "end a session by `sandkasten rm`, or try again later",
    "WORKSPACE_BUSY": "`sandkasten ps` shows its sessions",
}


def add_client_options(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    """Add the options that choose the server, and `--json`."""
    where = parser.add_argument_group("server")
    chosen = where.add_mutually_exclusive_group()
    chosen.add_argument("--context", metavar="NAME", help="a server of `sandkasten context list`")
    chosen.add_argument("--config", type=Path, metavar="FILE", help="the installation of this configuration file")
    chosen.add_argument("--data-dir", type=Path, metavar="DIR", help="the installation of this data directory")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON: one object, or one a line")


def add_session(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    """Add the argument that names a session, or several."""
    about = "the beginning of an id, a label (job=7), or - for the last one used"
    parser.add_argument("session", metavar="SESSION", nargs=nargs, help=about)


def verb(work: ClientVerb) -> Callable[[argparse.Namespace], int]:
    """Return the command of a client verb: `parser.set_defaults(command=verb(work))`."""

    def command(arguments: argparse.Namespace) -> int:
        try:
            return run_client(work, arguments)
        except (Stop, BrokenPipeError):
            raise
        except Exception:  # noqa: BLE001  # a bug of ours: told whole, with the status that says so
            traceback.print_exc()
            return FAULT

    return command


def server_of(arguments: argparse.Namespace) -> Server:
    """Return the server that the arguments, or else the environment, contexts and this machine, say. Raises `Stop`."""
    return _as_given(choose_server, arguments)


def is_elsewhere(arguments: argparse.Namespace) -> bool:
    """Return whether a server is named, so that this machine's installation is not meant. Raises `Stop`."""
    return _as_given(chosen_context, arguments) != LOCAL


def _as_given(choose: Callable[..., T], arguments: argparse.Namespace) -> T:
    given = vars(arguments)
    try:
        return choose(os.environ, **{name: given.get(name) for name in ("context", "config", "data_dir")})
    except ConfigError as error:
        raise Stop(str(error), FAULT) from None


def run_client(work: ClientVerb, arguments: argparse.Namespace) -> int:
    """Run a verb with a client of the chosen server, and return its exit status. Raises `Stop`."""
    server = server_of(arguments)
    for name in _NEEDLESS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as documented for the import statement
    try:
        import asyncio

        import anyio

        from sandkasten.cli.output import HeldOutput, write_held
        from sandkasten.cli.terminal import heeding
        from sandkasten.sdk import SandboxClient

        async def main() -> int:
            try:
                client = SandboxClient(base_url=server.url, api_key=server.api_key, timeout=_PATIENCE_S)
            except ValueError as error:
                raise Stop(f"{server.chosen_by}: {error}", FAULT) from None
            status = 0
            scope = anyio.CancelScope()

            def end(number: int) -> None:
                nonlocal status
                status = 128 + number
                scope.cancel()
                asyncio.get_running_loop().call_later(_END_S, os._exit, status)  # for a thread that can't be left

            # A terminal's encoding may lack much of what is printed.
            held = io.TextIOWrapper(HeldOutput(), sys.stdout.encoding, "backslashreplace", write_through=True)
            with heeding(end, *_ENDING), contextlib.redirect_stdout(held):
                async with client:
                    with scope:
                        try:
                            status = await work(arguments, client)
                        finally:
                            await write_held()
            return status

        return anyio.run(main)
    except Exception as error:
        for leaf in _leaves(error):
            if isinstance(leaf, BrokenPipeError):
                raise leaf from None
            if (stop := _explained(leaf, server)) is not None:
                raise stop from error
        raise


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _explained(error: BaseException, server: Server) -> Stop | None:
    """Return the sentence for a failure; None for one that is a bug, or speaks for itself."""
    from sandkasten import errors

    if isinstance(error, Stop):
        return error
    if isinstance(error, errors.SandkastenAPIError):
        advice = _ADVICE.get(error.code)
        return Stop(printable_line(error.message) + (f": {advice}" if advice else "") + _about(error), FAULT)
    if isinstance(error, errors.ConnectionFailed) and "no server answers" in error.message:
        return Stop(
            f'no server answers at {server.url} ({server.chosen_by}): start one with "sandkasten serve", '
            'or choose another with "sandkasten context use"',
            FAULT,
        )
    if isinstance(error, errors.SandkastenError):
        return Stop(f"{printable_line(error.message)} ({server.url})", FAULT)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{printable_line(os.fsdecode(error.filename))}: "
        return Stop(f"{where}{error.strerror or error}", FAULT)
    return None


def _about(error: object) -> str:
    """Return the bad fields of a refused request, and the request's id where the server is at fault."""
    details = getattr(error, "details", {})
    status = getattr(error, "status_code", None) or 0
    if getattr(error, "code", "") == "INVALID_REQUEST" and details:
        return "\n" + "\n".join(printable_line(f"  {name}: {fault}") for name, fault in details.items())
    return f" (request {getattr(error, 'request_id', None)})" if status == 500 else ""


# Sessions by name


async def find_session(client: SandboxClient, name: str, *, ended: bool = False) -> Session:
    """Return the session that a name on the command line means, and remember it as the last one used.

    A whole id is believed without a question. With `ended`, sessions that have ended count where no live one fits.

    Raises:
        Stop: no session fits, or several do.
    """
    found = await _find(client, name, ended=ended)
    remember(client, found)
    return client.session(found)


async def _find(client: SandboxClient, name: str, *, ended: bool) -> str:
    if name == LAST:
        if (last := _read_last().get(client.base_url)) is None:
            raise Stop("there is no last session here: name one of `sandkasten ps`", FAULT)
        return last
    if ID.match(name):
        return name
    if "=" in name:
        matches = [each.id async for each in client.sessions(label=name)]
    elif _BEGINNING.match(name):
        matches = [each.id async for each in client.sessions() if each.id.startswith(name)]
        if not matches and ended:
            matches = [each.id async for each in client.sessions(status="all") if each.id.startswith(name)]
    else:
        raise Stop(
            f"{printable_line(name)!r} names no session: give the beginning of an id, a label such as job=7, or -",
            BAD_ARGUMENTS,
        )
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise Stop(f"no live session fits {name!r}: `sandkasten ps -a` lists sessions", FAULT)
    shown = ", ".join(matches[:_SHOWN_MATCHES]) + (", …" if len(matches) > _SHOWN_MATCHES else "")
    raise Stop(f"{len(matches)} sessions fit {name!r} ({shown}): give more of an id", FAULT)


def remember(client: SandboxClient, session_id: str) -> None:
    """Record that `-` stands for this session from now on, at this server."""
    last = _read_last()
    if last.get(client.base_url) == session_id:
        return
    last.pop(client.base_url, None)
    kept = dict([*last.items(), (client.base_url, session_id)][-_KEPT_LAST:])
    path = _last_path()
    with contextlib.suppress(OSError):  # a convenience: a read-only home is no reason to fail
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(json.dumps(kept))
        new.replace(path)


def _read_last() -> dict[str, str]:
    try:
        value = json.loads(_last_path().read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {url: each for url, each in value.items() if isinstance(each, str) and ID.match(each)}


def _last_path() -> Path:
    return own_directory(os.environ, "XDG_STATE_HOME", ".local/state") / "last.json"
