"""`sandkasten serve`: the daemon in the foreground. The only place that receives signals. Root only at its start.

SIGINT, SIGTERM, SIGQUIT and SIGHUP stop the daemon in good order; a second signal ends it at once. Signals of a
terminal end the sessions, too, since a person who types Ctrl-C is done with them; SIGTERM, which service managers send,
lets commands end and leaves sessions to the next start. The configuration or `--stop-sessions` may say otherwise.
SIGQUIT or SIGHUP that is ignored at the start (nohup(1)) stays ignored. Logs go to stderr, the few lines for people to
stdout. The key is on neither.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from shlex import quote

import attrs
import trio

from nsinit.wire.protocol import SeccompProfile
from sandkasten import app, log
from sandkasten.actors.supervision import GiveUp
from sandkasten.api.http.listen import ListenError
from sandkasten.cli.common import Stop, load, make_data_dir, require_root
from sandkasten.cli.heap import Heap
from sandkasten.cli.keys import with_key
from sandkasten.cli.notices import notices
from sandkasten.cli.privilege import Means, means
from sandkasten.config import Config, ConfigError
from sandkasten.config.seccomp import load_filters
from sandkasten.errors import InvalidImage, NsinitLost, SandkastenError
from sandkasten.host import examine
from sandkasten.host.data_dir import locked
from sandkasten.host.examine import read_machine
from sandkasten.host.notify import Notifier, open_notifier
from sandkasten.host.paths import DataPaths
from sandkasten.images.catalog import Catalog
from sandkasten.installation import forget_listening, tell_listening
from sandkasten.model.node import Machine, ProtectionState, System

logger = logging.getLogger(__name__)

_BUILD = "sandkasten image build --recipe python"
_STOP_S = 120.0
"""Longer than all deadlines of a stop in good order together, but for the configured ones."""


def serve(arguments: argparse.Namespace) -> int:
    """Run until a signal comes; return 0 after a stop in good order."""
    config = load(arguments)
    notifier = open_notifier(os.environ)  # while its socket can still be reached
    try:
        machine = _look_and_import(config)
        profiles = load_filters(config.security)  # root's eyes: operators may keep them from everybody else
        with locked(config.data_dir), means(config, profiles) as at_hand:
            if arguments.stop_sessions:
                config = attrs.evolve(config, sessions_on_stop="destroy")
            return _serve_until_signal(config, machine, profiles, at_hand, notifier)
    except Exception as error:
        if reason := explain(error):
            notifier.say(reason)
            raise Stop(reason) from error
        raise
    finally:
        notifier.close()


def _look_and_import(config: Config) -> Machine:
    """As `look_at_machine`, which mostly waits for another process; the web framework is imported meanwhile."""
    with ThreadPoolExecutor(1) as beside:  # and has no thread left afterwards: root is given away by a single one
        machine = beside.submit(look_at_machine, config)
        import sandkasten.api.app  # noqa: F401 - `app.serve` needs it

        return machine.result()


def look_at_machine(config: Config) -> Machine:
    """Return the examination of the machine; without root, the one that the service `sandkasten nsinit` made."""
    if os.geteuid() != 0 and config.nsinit_socket is not None:
        machine = read_machine(DataPaths(config.data_dir).machine)
    else:
        require_root()
        make_data_dir(config.data_dir)
        machine = examine.examine(config.data_dir, config=config)
    try:
        app.require_protections(config, machine)
    except ConfigError as lacks:
        raise Stop(f"{lacks}\n`sandkasten doctor` shows everything that was tried") from None
    return machine


def _serve_until_signal(
    config: Config, machine: Machine, profiles: Sequence[SeccompProfile], at_hand: Means, notifier: Notifier
) -> int:
    key_is_given = config.api_key is not None
    config = with_key(config)

    def started(addresses: Sequence[str]) -> None:
        try:
            tell_listening(config.data_dir, addresses)
        except OSError as error:
            logger.warning("listening_not_told", extra={"error": error.strerror})
        greet(config, addresses, key_is_given=key_is_given)
        notifier.ready(f"listening on {', '.join(addresses)}")

    serve_all = partial(
        app.serve,
        config,
        machine,
        profiles,
        started=started,
        told=_tell,
        start_nsinit=at_hand.start_nsinit,
        start_egress=at_hand.start_egress,
        early=at_hand.early,
        notifier=notifier,
    )
    writer = log.configure(config.server.log_level, format=config.server.log_format)
    try:
        for notice in notices(config):
            say(f"note: {notice}")
        heap = Heap()
        with heap.kept():
            trio.run(_run, config, serve_all, at_hand, notifier, heap, strict_exception_groups=True)
    finally:
        with contextlib.suppress(OSError):
            forget_listening(config.data_dir)
        writer.close()
    return 0


async def _run(
    config: Config, serve_all: Callable[..., Awaitable[None]], at_hand: Means, notifier: Notifier, heap: Heap
) -> None:
    order = stop_order(config, signal.SIGTERM)
    numbers = stop_signals()
    with trio.open_signal_receiver(*numbers) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_all, order=order))
            nursery.start_soon(_watch_launcher, at_hand)
            nursery.start_soon(heap.run)
            async for number in signals:
                how = stop_order(config, signal.Signals(number))
                order.ends_sessions, order.drain_s = how.ends_sessions, how.drain_s
                fate = "sessions are ended" if how.ends_sessions else "sessions run on"
                say(f"{signal.Signals(number).name}: stopping; {fate}")
                notifier.stopping(fate)
                # Last resort: print where the stop hangs, and end; the next start adopts the sessions that run on.
                faulthandler.dump_traceback_later(_STOP_S + config.server.graceful_timeout_s + how.drain_s, exit=True)
                break
            nursery.cancel_scope.cancel()
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)


async def _watch_launcher(at_hand: Means) -> None:
    """Log the end of the launcher early: all works without it until nsinit has to be started again."""
    if at_hand.launcher is not None:
        await at_hand.launcher.wait_ended()
        logger.error("launcher_lost", extra={"advice": "restart the daemon: a fork server that ends can't be replaced"})


def stop_order(config: Config, number: signal.Signals) -> app.StopOrder:
    """Return how a signal stops the daemon."""
    is_service = number is signal.SIGTERM
    ends = not is_service if config.sessions_on_stop == "auto" else config.sessions_on_stop == "destroy"
    return app.StopOrder(ends_sessions=ends, drain_s=config.server.drain_timeout_s if is_service else 0.0)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end the daemon."""
    optional = (signal.SIGQUIT, signal.SIGHUP)
    return [signal.SIGINT, signal.SIGTERM, *(each for each in optional if signal.getsignal(each) != signal.SIG_IGN)]


def _tell(system: System) -> None:
    for each in system.protections:
        if each.state is not ProtectionState.ON:
            say(f"note: {each.name} is {each.state}: {each.detail}")


def greet(config: Config, addresses: Sequence[str], *, key_is_given: bool) -> None:
    """Print the addresses, the place of the key, and a command line to paste."""
    for address in addresses:
        say(f"listening on {address}")
    if key_is_given:
        say("API key: the configured one (the line below takes it from SANDKASTEN_API_KEY)")
    else:
        say(f"API key: in {config.api_key_path}")
    if _starts_with_host(config):
        say(f"images: sessions see this machine's own /usr; for one with pip and a compiler: {_BUILD}")
    say("try:")
    say(f"  {curl_line(config, addresses, key_is_given=key_is_given)}")


def _starts_with_host(config: Config) -> bool:
    """Whether sessions that name no image get the machine's own system."""
    try:
        return Catalog(config.data_dir, aliases=config.image_aliases).get(config.default_image).kind == "host"
    except InvalidImage:
        return False


def say(line: str) -> None:
    """Print a line for people. Where nobody can read stdout (a full device, a reader that left) the daemon goes on
    without it: the line is in the log, and the next ones go nowhere, as does what Python's buffer still has."""
    try:
        print(line, flush=True)
    except OSError as error:
        logger.warning("stdout_lost", extra={"error": error.strerror, "line": line})
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def curl_line(config: Config, addresses: Sequence[str], *, key_is_given: bool) -> str:
    """Return a command that makes a session on the first address."""
    key = "$SANDKASTEN_API_KEY" if key_is_given else f"$(cat {quote(str(config.api_key_path))})"
    address = addresses[0]
    if address.startswith("unix:"):
        place = f"--unix-socket {quote(address.removeprefix('unix:'))} http://localhost/v1/sessions"
    else:
        place = f"{address.rstrip('/')}/v1/sessions"
    return f"""curl -sS {place} -H "Authorization: Bearer {key}" -d '{{}}'"""


def explain(error: BaseException) -> str | None:
    """Return one sentence for a failure that the operator can mend, None for a bug."""
    leaves = sorted(_leaves(error), key=lambda leaf: isinstance(leaf, NsinitLost))  # the cause stands beside it
    for leaf in leaves:
        if isinstance(leaf, OSError) and leaf.errno == errno.EADDRINUSE:
            return f"the address is in use: {leaf}; choose another with --listen, or stop who has it"
        if isinstance(leaf, ConfigError | SandkastenError | ListenError):
            return str(leaf)
        if isinstance(leaf, GiveUp):
            return f"can't go on: {leaf}; sessions run on, and the next start adopts them"
        if isinstance(leaf, PermissionError) and leaf.filename:
            return f"{leaf.strerror}: {os.fsdecode(leaf.filename)}"
    return None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
