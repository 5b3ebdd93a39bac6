"""The composition root: configuration → tree → HTTP front. The only wiring; every other part is given its partners."""

from __future__ import annotations

import logging
import os
import re
import resource
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from nsinit.wire.protocol import SeccompProfile
from sandkasten.actors.node.creating import NodeIdentity
from sandkasten.actors.node_view import keep_beating
from sandkasten.actors.supervision import ChildSpec, ChildSupervisor
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.admission.keys import KeyWatch
from sandkasten.config import MIB, Config, ConfigError
from sandkasten.config.seccomp import load_filters
from sandkasten.host import examine
from sandkasten.host.account import ROOT
from sandkasten.host.data_dir import hand_over, locked, make_data_dir
from sandkasten.host.notify import Notifier
from sandkasten.host.paths import DataPaths, read_boot_id
from sandkasten.host.protections import Situation, lacking, protections
from sandkasten.images.catalog import Catalog
from sandkasten.images.host import ensure_host_image
from sandkasten.links.processes import StartEgress, StartNsinit, start_as_child, start_egress_as_child
from sandkasten.model import WarmProcess
from sandkasten.model.network import NetworkMode
from sandkasten.model.node import Machine, System
from sandkasten.store import sessions as session_store
from sandkasten.store.database import DatabaseTooNew, open_database
from sandkasten.supervisor import Supervisor

if TYPE_CHECKING:
    from sandkasten.api.e2b.front import E2bFront
    from sandkasten.api.http.listen import EarlySockets
    from sandkasten.api.http.settings import ApiSettings

log = logging.getLogger(__name__)

_NODE_ID = re.compile(r"[0-9a-f]{8}")
_RUN_KEY_BYTES = 32
_START_S = 80.0
"""Seconds within which every part must have started; less than the 90 that systemd waits for. A start with a thousand
sessions takes two on a quiet machine."""

_END_SESSIONS_S = 60.0
"""Seconds that ending all sessions may take at a stop."""


@attrs.define
class StopOrder:
    """A stop in good order: whether sessions end with it, and the seconds that requests in flight get before."""

    ends_sessions: bool
    drain_s: float = 0.0


@asynccontextmanager
async def open_supervisor(config: Config) -> AsyncIterator[LocalSupervisor]:
    """Run the tree, without HTTP, inside any trio program, for as long as the context is open.

    Must run as root, and changes nothing about that. Installs no signal handler. Leaving the context stops the tree;
    sessions are then destroyed, or with `sessions_on_stop: keep` left running for the next start.

    Raises:
        ConfigError: another daemon uses the data directory, or it can't be used.
        RuntimeError: the event loop is not trio's. Nothing was changed.
    """
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError(
            "open_supervisor needs trio's event loop, and this is another: call the program's main function by "
            '`trio.run(main)` or `anyio.run(main, backend="trio")`; an asyncio program starts `sandkasten serve` and '
            "talks to its HTTP API"
        )
    make_data_dir(config.data_dir)
    with locked(config.data_dir):
        if os.geteuid() == 0:
            hand_over(config, ROOT)  # a daemon of another user may have been here
        machine = await trio.to_thread.run_sync(partial(examine.examine, config.data_dir, config=config))
        require_protections(config, machine)
        profiles = await trio.to_thread.run_sync(load_filters, config.security)
        order = StopOrder(ends_sessions=config.sessions_on_stop != "keep")
        async with open_tree(config, machine, profiles, start_as_child, order) as supervisor:
            yield supervisor


async def serve(
    config: Config,
    machine: Machine,
    profiles: Sequence[SeccompProfile],
    *,
    order: StopOrder,
    started: Callable[[Sequence[str]], None],
    told: Callable[[System], None] | None = None,
    start_nsinit: StartNsinit = start_as_child,
    start_egress: StartEgress | None = start_egress_as_child,
    early: EarlySockets | None = None,
    notifier: Notifier | None = None,
) -> None:
    """Run the tree with its HTTP front until cancelled.

    The caller holds the data directory (`data_dir.locked`), and has examined the machine and read the configured
    filters, which takes root.

    `order` says how the tree stops; it may be changed until then. `told` is called with the system in force, `started`
    after it with the bound addresses. `early`: sockets that listen already, instead of the configured ones. `notifier`
    gets signs of life.
    """
    from sandkasten.api.app import make_app  # importing the web framework takes 0.3 s, and library users need none
    from sandkasten.api.http.mcp import McpFront
    from sandkasten.api.http.server import serve as serve_http

    _raise_descriptor_limit()
    settings = _front_settings(config)
    mcp = McpFront()

    def listens(addresses: Sequence[str]) -> None:
        mcp.listens_on(addresses[0])
        started(addresses)

    def front(supervisor: LocalSupervisor) -> Sequence[ChildSpec]:
        e2b = _e2b_front(config, supervisor.key_for("e2b")) if config.e2b.enabled else None
        app = make_app(supervisor, settings=settings, shares=supervisor.shares, mcp=mcp, e2b=e2b)
        watch = KeyWatch(supervisor.shares.ring, DataPaths(config.data_dir).keys)

        async def start_api(*, task_status: trio.TaskStatus[object]) -> None:
            await serve_http(app, settings, early=early, task_status=_Announcement(task_status, listens))

        return (
            ChildSpec("keys", watch.run),
            ChildSpec("mcp", mcp.run, may_keep_failing=True),
            *([] if e2b is None else [ChildSpec("e2b", e2b.watchers.run, may_keep_failing=True)]),
            ChildSpec("api", start_api),
        )

    warm = warm_processes(config)
    async with open_tree(
        config, machine, profiles, start_nsinit, order, start_egress=start_egress, warm=warm, more=front, told=told
    ) as supervisor:
        await keep_beating(supervisor, notifier or Notifier())


def warm_processes(config: Config) -> Mapping[str, WarmProcess]:
    """Return the processes that members of session pools have running where the HTTP front is served, by the names of
    the pools."""
    if not config.e2b.enabled or not config.pool.in_force:
        return {}
    from sandkasten.api.e2b.interpreter import warm_pools  # as above
    from sandkasten.api.e2b.sandboxes import E2bTerms

    terms = E2bTerms(key=b"", templates=config.e2b.templates, aliases=config.image_aliases)
    return warm_pools(config.pool.in_force, terms)


def _e2b_front(config: Config, key: bytes) -> E2bFront:
    from sandkasten.api.e2b.front import E2bFront  # as above
    from sandkasten.api.e2b.sandboxes import E2bTerms

    terms = E2bTerms(
        key=key,
        templates=config.e2b.templates,
        aliases=config.image_aliases,
        widest=NetworkMode(config.egress_in_force.max_mode),
        max_idle_s=config.maximum.idle_timeout_seconds,
        max_lifetime_s=config.maximum.max_lifetime_seconds,
        has_ports=config.preview.listen is not None,
    )
    return E2bFront(terms)


_E2B_KEEP_ALIVE_S = 310.0
"""Time for which a connection is kept where E2B's clients come: they use one again for up to 300 s, and do not repeat
what they sent on one that was closed just then."""


def _front_settings(config: Config) -> ApiSettings:
    from sandkasten.api.http.settings import ApiSettings  # as above

    return ApiSettings(
        listen=config.listen,
        api_key=config.api_key,
        default_limits=config.defaults.limits,
        default_network=NetworkMode(config.defaults.network_mode),
        max_exec_timeout_ms=config.defaults.max_exec_timeout_ms,
        allow_unlimited_exec=config.runs.allow_unlimited,
        allowed_origins=config.allowed_origins,
        max_command_bytes=config.server.max_command_bytes,
        max_json_bytes=config.server.max_json_bytes,
        spool_dir=config.data_dir,
        max_upload_bytes=config.server.max_upload_bytes,
        max_import_bytes=config.workspace.max_import_mb * MIB,
        max_read_bytes=config.server.max_read_bytes,
        max_connections=config.server.max_connections,
        write_timeout_s=config.server.write_timeout_s,
        head_timeout_s=config.server.head_timeout_s,
        keep_alive_timeout_s=max(config.server.keep_alive_timeout_s, _E2B_KEEP_ALIVE_S if config.e2b.enabled else 0.0),
        graceful_timeout_s=config.server.graceful_timeout_s,
    )


@asynccontextmanager
async def open_tree(
    config: Config,
    machine: Machine,
    profiles: Sequence[SeccompProfile],
    start_nsinit: StartNsinit,
    order: StopOrder,
    *,
    start_egress: StartEgress | None = start_egress_as_child,
    warm: Mapping[str, WarmProcess] | None = None,
    more: Callable[[LocalSupervisor], Sequence[ChildSpec]] = lambda _supervisor: (),
    told: Callable[[System], None] | None = None,
) -> AsyncIterator[LocalSupervisor]:
    """Run the tree, with the children of `more` behind it, while the context is open; `order` says how the tree stops.
    `warm` are processes that members of session pools have running, by the names of pools.

    The caller holds the data directory and has done the privileged work; see `serve`.
    """
    catalog, node = await trio.to_thread.run_sync(_prepare, config)
    supervisor = LocalSupervisor(
        config,
        catalog,
        node,
        machine=machine,
        pool_size=config.server.pool_sandboxes,
        profiles=profiles,
        start_nsinit=start_nsinit,
        start_egress=start_egress,
        warm=warm,
    )
    guard = ChildSpec("guard", partial(_guard, supervisor, config, told), restart="temporary")
    tree = ChildSupervisor([*supervisor.children(), guard, *more(supervisor)])
    stop, has_ended = trio.CancelScope(), trio.Event()

    async def run_tree(*, task_status: trio.TaskStatus[None]) -> None:
        try:
            with stop:
                await tree.run(task_status=task_status)
        finally:
            has_ended.set()

    async with trio.open_nursery(strict_exception_groups=True) as nursery:
        with trio.fail_after(_START_S):
            await nursery.start(run_tree)
        stop.shield = True  # from here on only this function ends the tree: a cancellation must not outrun the draining
        log.info("supervisor_started", extra={"node": node.id, "incarnation": node.incarnation})
        try:
            yield supervisor
        finally:
            if not has_ended.is_set():  # a tree that failed ends no session: the next start adopts them
                with trio.move_on_after(order.drain_s + 2 * _END_SESSIONS_S, shield=True):
                    await _wind_up(supervisor, order)
            stop.cancel()
            supervisor.close()


async def _wind_up(supervisor: LocalSupervisor, order: StopOrder) -> None:
    """Wait for requests in flight, then end the sessions or leave them running. Each step has a deadline.

    The front still answers meanwhile, so that waiting callers get their error.
    """
    with trio.move_on_after(order.drain_s):
        await supervisor.finish()
    with trio.move_on_after(_END_SESSIONS_S) as patience:
        await (supervisor.end_sessions() if order.ends_sessions else supervisor.leave_sessions())
    if patience.cancelled_caught:  # the next start finds the sessions
        log.error("stop_of_sessions_timed_out", extra={"waited_s": _END_SESSIONS_S})


def require_protections(config: Config, machine: Machine) -> None:
    """Refuse to start on a machine without a required protection.

    Raises:
        ConfigError: one line for each required protection that is missing, with its fix.
    """
    _require(lacking(config, protections(Situation(config, machine)), before_start=True))


async def _guard(
    supervisor: Supervisor,
    config: Config,
    told: Callable[[System], None] | None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Stop the start when nsinit lacks a required protection, before clients can connect; adopted sessions run on.

    Raises:
        ConfigError: one line for each required protection that is missing, with its fix.
    """
    system = await supervisor.system()
    _require(lacking(config, system.protections))
    if told is not None:
        told(system)
    task_status.started()


def _require(lacks: Sequence[str]) -> None:
    if lacks:
        raise ConfigError("\n".join(lacks))


def _raise_descriptor_limit() -> None:
    """Raise the descriptor limit to the hard limit; a session needs about a dozen. The daemon only: a library leaves
    the limits of its process alone.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Announcement:
    """Passes the bound addresses on before the tree goes on."""

    def __init__(self, inner: trio.TaskStatus[object], started: Callable[[Sequence[str]], None]) -> None:
        self._inner, self._started = inner, started

    def started(self, addresses: Any = ()) -> None:  # the protocol of trio.TaskStatus
        self._started(addresses)
        self._inner.started(addresses)


def _prepare(config: Config) -> tuple[Catalog, NodeIdentity]:
    """Prepare the node's identity and the default image, once per start, before the tree. Blocking."""
    try:
        with closing(open_database(config.db_path)) as database:
            stored_id = session_store.node_value(database, "node_id", secrets.token_hex(4))
            run_key = _run_key(session_store.node_value(database, "run_key", secrets.token_hex(_RUN_KEY_BYTES)))
            incarnation = session_store.next_incarnation(database)
    except (sqlite3.Error, DatabaseTooNew) as error:
        raise ConfigError(f"the database {config.db_path} can't be used: {error}") from error
    node_id = _kept_node_id(DataPaths(config.data_dir).node_id, stored_id)
    catalog = Catalog(config.data_dir, aliases=config.image_aliases, allowed=config.allowed_images)
    if os.geteuid() == 0:
        prepare_images(catalog)
    return catalog, NodeIdentity(node_id, incarnation, read_boot_id(), run_key)


def _run_key(stored: str) -> bytes:
    """Return the key of run tickets; in place of a damaged key a new one, which makes earlier tickets void."""
    try:
        key = bytes.fromhex(stored)
    except ValueError:
        key = b""
    return key if len(key) == _RUN_KEY_BYTES else secrets.token_bytes(_RUN_KEY_BYTES)


def prepare_images(catalog: Catalog) -> None:
    """Sweep the image store and make the `host` image, as root; a start without root relies on an earlier one."""
    with suppress(OSError):  # the next start tries again
        catalog.sweep()
    ensure_host_image(catalog)


def _kept_node_id(path: Path, stored_id: str) -> str:
    """Return the node's id from a file of its own, made from the database's copy if there is none, or anew.

    The cgroups of all sandboxes lie below a directory with this id, so the id must survive the loss of the database.
    """
    try:
        node_id = path.read_text("ascii").strip()
        if _NODE_ID.fullmatch(node_id):
            return node_id
    except (OSError, ValueError):
        pass
    if not _NODE_ID.fullmatch(stored_id):
        stored_id = secrets.token_hex(4)
    new = path.with_suffix(".new")
    new.write_text(f"{stored_id}\n", "ascii")
    new.replace(path)
    return stored_id
