"""The egress client: owner of the egress process, and of the way out of every session that has one.

A way out is three descriptors in the session's network namespace, made by nsinit. The egress process gets copies and
serves them; the originals stay here, so that a process that follows another gets them too, while connects wait in the
listener's backlog. The process starts with the first way out. Nothing is reached without it: closing every copy of the
descriptors is how a way out ends.

The process outlives this daemon while sessions do, and serves them by what it was told last. The next daemon finds it
at its socket, takes copies of the descriptors, and says of each session what holds from then on. A way that no session
claims is closed.

Each session has one policy or none, as asked for last, and one task puts the policies in force in order. Askers wait
until their policy is in force. What the process tells is kept in `journal/egress.py`, and told to clients as events.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, assert_never

import attrs
import trio

from egress import protocol
from egress.policy import Reason, parse_proxy
from nsinit.wire.protocol import NETWORK_STAGE, CloseBridge, OpenBridge, TrustAuthority
from sandkasten import logcontext
from sandkasten.actors.core import Actor, Ask, Ref, unwrap
from sandkasten.actors.services.broker import ConnectEgress, find_secrets
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import NetworkSockets, ask_patiently, call, open_network
from sandkasten.admission.network import bridge_rules, rules_in_force
from sandkasten.config import EgressSettings
from sandkasten.counters.metrics import Metrics
from sandkasten.counters.node import read_link
from sandkasten.errors import (
    BuildFailed,
    Conflict,
    EgressUnavailable,
    InvalidRequest,
    InvalidRule,
    NetworkNotSupported,
    SandkastenError,
    SecretNotFound,
    SecretsOff,
    Unavailable,
)
from sandkasten.journal.egress import EgressLogs
from sandkasten.journal.ring import Journal
from sandkasten.links.egress import EgressLink
from sandkasten.links.fds import OwnedFd
from sandkasten.links.processes import STOP_S, ChildProcess, StartEgress, find_egress, keep_running
from sandkasten.model import EventType, Session
from sandkasten.model.network import EgressEntry, EgressLogging, EgressVerdict, Network, NetworkCounters, NetworkMode

log = logging.getLogger(__name__)

_STEERING = frozenset(f"{NETWORK_STAGE}{stage}" for stage in ("map", "program", "link"))
_NOT_HERE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP})
"""Errors of the steps in `_STEERING` on a kernel that has no such programs, or lets nobody load them (bpf(2))."""

_START_S = 30.0
"""Deadline for the first answer of a process, and for a policy when a process is started for it: an interpreter and its
libraries take a third of a second on a quick machine."""

_IN_FORCE_S = 10.0
"""Deadline for the answer to one request of a process that has answered."""

_JOIN_PAUSE_S = 1.0

_CLAIM_S = 60.0
"""Time for the daemon to know of the sessions whose ways out it has taken from a process of an earlier one."""

_MOST_TAKEN = 16_384
_NO_BRIDGE = _NOT_HERE | {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENOENT}
"""Errors of nsinit that say what the machine, or root's configuration, lacks for the mode `bridge`."""

_NEVER = (InvalidRequest, InvalidRule, SecretNotFound, SecretsOff)
"""Errors of a policy that no later attempt would put in force."""

_COUNT_S = 2.0
"""The longest wait for the counters of a way out; statistics are wanted without them, too."""

_REFUSALS_EVERY_S = 10.0
"""Time between two events of one type about refusals of one session."""


@attrs.frozen
class OpenWay(Ask[None]):
    """Give a session a way out, or the one it has another policy. Answered when that is in force.

    Raises:
        EgressUnavailable: the process can't be started or does not answer. A new way out is closed then; one that was
            there before stays as it was, or closed.
        NetworkNotSupported: the kernel can't steer connections.
        SecretNotFound, SecretsOff: a secret that the network names can't be had.
        BuildFailed: nsinit could not open the session's namespace.
        InvalidRequest, InvalidRule: the configuration has no such group any more, or a lower maximum.
    """

    session_id: str
    network: Network


@attrs.frozen
class CloseWay(Ask[None]):
    """End a session's way out: connections are reset, and connects are refused from then on. Answered when no process
    has the descriptors any more. `forget`: drop the session's log."""

    session_id: str
    forget: bool = False


@attrs.frozen
class CountWay(Ask[NetworkCounters]):
    """Ask for the counters of a session; all are 0 without a way out. Raises `EgressUnavailable`."""

    session_id: str


Message = OpenWay | CloseWay | CountWay


@attrs.define(eq=False)
class _Way:
    """A way out. `policy`: as asked for last. `is_attached`: the present process has the descriptors."""

    session_id: str
    policy: protocol.PolicyText
    limits: protocol.WayOutLimits
    secrets: tuple[protocol.SecretUse, ...] = ()
    fds: Sequence[OwnedFd] = ()
    """Empty until nsinit has made them."""
    is_attached: bool = False
    unclaimed_since: float | None = None
    """The time when it was taken from a process of an earlier daemon, until a session has it."""
    settled: trio.Event = attrs.field(factory=trio.Event)
    """Set when `policy` is in force, or was refused."""
    refusal: SandkastenError | None = None

    @property
    def is_in_force(self) -> bool:
        """Whether the present process has the policy."""
        return self.is_attached and self.settled.is_set()

    def take(self, sockets: NetworkSockets) -> None:
        """Own the descriptors that nsinit made."""
        self.fds = sockets.fds

    def note_attached(self, *, attached: bool) -> None:
        """Record whether the present process has the descriptors."""
        self.is_attached = attached

    def settle(self, refusal: SandkastenError | None = None) -> None:
        """Tell those who wait that the policy is in force, or refused."""
        self.refusal = refusal
        self.settled.set()

    def change(
        self, policy: protocol.PolicyText, limits: protocol.WayOutLimits, secrets: tuple[protocol.SecretUse, ...]
    ) -> None:
        self.policy, self.limits, self.secrets = policy, limits, secrets
        self.settled, self.refusal, self.unclaimed_since = trio.Event(), None, None

    def close(self) -> None:
        for fd in self.fds:
            fd.close()


class EgressClient(Actor):
    """See the module's docstring. Without `start` the node has no way to an egress process. `steers`: the kernel can
    steer connections; otherwise sessions have a proxy alone."""

    def __init__(
        self,
        ref: Ref,
        *,
        nsinit: Ref,
        broker: Ref,
        settings: EgressSettings,
        directory: SessionDirectory,
        logs: EgressLogs,
        journal: Journal,
        metrics: Metrics,
        start: StartEgress | None,
        path: Path,
        steers: bool,
    ) -> None:
        super().__init__(ref)
        self._nsinit, self._broker = nsinit, broker
        self._directory, self._settings, self._start = directory, settings, start
        self._wants_broker, self._joined = trio.Event(), trio.Event()
        """`_joined` is set while the process has a broker to hand connections to."""
        self._path, self._steers = path, steers
        self._logs, self._journal, self._metrics = logs, journal, metrics
        self._ways: dict[str, _Way] = {}
        self._detached: dict[str, trio.Event] = {}
        """Sessions that the process still has, and the events of their detachment."""
        self._bridges: dict[str, str] = {}
        """Sessions in the mode `bridge`, and the names of their links."""
        self._newest: dict[str, OpenWay | CloseWay] = {}
        """The last message about each session; what came before it and still waits has no effect."""
        self._has_taken = trio.Event()
        """Set when no process can have the descriptors of a session that this actor does not know of."""
        self._link: EgressLink | None = None
        self._process: ChildProcess | None = None
        self._work = trio.Event()
        self._refusals: dict[tuple[EventType, str], _Refusals] = {}
        self._totals = protocol.EgressTotals()
        """Counts that the present process told of last."""
        self._processes = 0
        """The number of processes that came to serve."""

    async def on_start(self) -> None:
        """Begin to look after the process. After a fault of this actor, which closed every way out, open them again."""
        logcontext.origin.set(logcontext.NOBODY)  # what happens to the process is no session's doing
        if self._start is None:
            self._has_taken.set()
        else:
            self._nursery.start_soon(keep_running, "egress", self._run_process)
        self._nursery.start_soon(self._tidy)
        for entry in self._directory:
            if entry.session.network.has_way_out:
                message = OpenWay(entry.session.id, entry.session.network)
                self._newest[entry.session.id] = message
                self._nursery.start_soon(self._open_again, message)

    async def _open_again(self, message: OpenWay) -> None:
        try:
            await self._open(message)
        except SandkastenError as error:
            log.error("way_out_not_restored", extra={"session_id": message.session_id, "error": str(error)})

    async def handle(self, message: Message) -> Any:  # each message names its answer
        match message:
            case OpenWay(session_id):
                self._newest[session_id] = message
                return self.defer(self._open, message)
            case CloseWay(session_id):
                self._newest[session_id] = message
                return self.defer(self._close_as_asked, message)
            case CountWay(session_id):
                return self.defer(self._count, session_id)
            case _:
                assert_never(message)

    async def on_stop(self) -> None:
        for way in self._ways.values():
            way.close()
        if self._process is not None:
            await self._leave(self._process)

    async def _leave(self, process: ChildProcess) -> None:
        """End a process, but one that serves sessions, or may: the next daemon finds it."""
        if self._ways or not self._has_taken.is_set():
            process.close()
        else:
            await process.end("egress", STOP_S)

    # Policies -----------------------------------------------------------------------------------------------------

    async def _open_bridge(self, message: OpenWay) -> None:
        """Give a session a link of its own, which the kernel and nsinit see to, in place of a way out."""
        session_id = message.session_id
        refusal: SandkastenError | None = None
        try:
            rules = rules_in_force(message.network, self._settings)
        except _NEVER as error:
            refusal = error
        if refusal is not None:  # an earlier daemon allowed more
            await ask_patiently(self._nsinit, call(CloseBridge, session_id))
            raise refusal
        allow, deny = (bridge_rules(each) for each in (rules.allow, (*rules.deny, *self._settings.always_deny)))
        failure: SandkastenError | None = None
        try:
            opened = await ask_patiently(self._nsinit, call(OpenBridge, session_id, allow, deny))
            self._require_newest(message)
        except SandkastenError as error:
            failure = error
        if failure is not None:
            await self._give_up_bridge(message)
            if (
                isinstance(failure, BuildFailed)
                and failure.stage.startswith(NETWORK_STAGE)
                and failure.errno in _NO_BRIDGE
            ):
                raise NetworkNotSupported(f"no session can have the mode 'bridge' now: {failure}") from failure
            raise failure
        await self._close(session_id, False)
        self._bridges[session_id] = opened.link

    async def _give_up_bridge(self, message: OpenWay) -> None:
        """Leave no bridge that nobody knows of: nsinit may have made it, which ends the way out that was there.
        One that was in force before stays."""
        session_id = message.session_id
        newest = self._newest.get(session_id)
        is_wanted = newest is not message and isinstance(newest, OpenWay) and newest.network.mode is NetworkMode.BRIDGE
        if session_id in self._bridges or is_wanted:
            return
        if newest is not None:  # None: the session has ended, and its bridge with it
            self._nursery.start_soon(self._end_bridge, newest)
        if newest is message:
            await self._close(session_id, False)

    async def _end_bridge(self, message: OpenWay | CloseWay) -> None:
        """Have a bridge removed, however long nsinit is away, unless there is a newer message about the session."""
        while self._newest.get(message.session_id) is message:
            try:
                await ask_patiently(self._nsinit, call(CloseBridge, message.session_id))
                break
            except SandkastenError as error:
                log.error("bridge_not_closed", extra={"session_id": message.session_id, "error": str(error)})
                if not isinstance(error, Unavailable):
                    break
            await trio.sleep(_JOIN_PAUSE_S)

    async def _open(self, message: OpenWay) -> None:
        if message.network.mode is NetworkMode.BRIDGE:
            await self._open_bridge(message)
            return
        if self._start is None:
            raise EgressUnavailable("this daemon has no way to start an egress process")
        await self._wait_taken()
        try:
            policy, limits = self._policy_of(message.network)
            secrets = await self._secrets_of(message)
        except _NEVER:
            way = self._ways.get(message.session_id)
            if way is not None and way.unclaimed_since is not None:  # an earlier daemon allowed more
                self._nursery.start_soon(self._close, message.session_id, False)
            raise
        self._require_newest(message)
        way = self._ways.get(message.session_id)
        before = None if way is None else (way.policy, way.limits, way.secrets)
        if way is None:
            way = self._ways[message.session_id] = _Way(message.session_id, policy, limits, secrets)
            await self._make(way)
        else:
            way.change(policy, limits, secrets)
        self._logs.open(message.session_id, message.network.log)
        self._work.set()
        with trio.move_on_after(_START_S) as patience:
            await way.settled.wait()
            if secrets and way.refusal is None:
                await self._joined.wait()
        refusal = way.refusal
        if patience.cancelled_caught:
            refusal = EgressUnavailable("the egress process does not answer, or can't be started")
        if refusal is None:
            return
        self._require_newest(message)
        if before is None:
            await self._close(message.session_id, True)
        else:
            way.change(*before)
            self._work.set()
        raise refusal

    def _require_newest(self, message: OpenWay) -> None:
        """Raise `Conflict` when there is a newer message about the session."""
        if self._newest.get(message.session_id) is not message:
            raise Conflict("the network was changed meanwhile")

    async def _wait_taken(self) -> None:
        """Wait until the descriptors of an earlier daemon's process are here. Raises `EgressUnavailable`."""
        with trio.move_on_after(_START_S):
            await self._has_taken.wait()
        if not self._has_taken.is_set():
            raise EgressUnavailable("the egress process of an earlier daemon does not answer")

    async def _secrets_of(self, message: OpenWay) -> tuple[protocol.SecretUse, ...]:
        """Return the secrets that a session uses, which trusts the installation's authority then."""
        texts = await find_secrets(self._broker, message.network)
        secrets = texts.uses(message.session_id)
        if secrets:
            await ask_patiently(self._nsinit, call(TrustAuthority, message.session_id, texts.certificate))
            self._wants_broker.set()
        return secrets

    async def _make(self, way: _Way) -> None:
        """Have nsinit make the descriptors of a way that may be closed meanwhile."""
        sockets = None
        try:
            sockets = await ask_patiently(self._nsinit, open_network(way.session_id, steers=self._steers))
        except BuildFailed as error:
            if error.stage in _STEERING and error.errno in _NOT_HERE:
                raise NetworkNotSupported("this kernel can't steer a session's connections; see `doctor`") from error
            raise
        finally:
            if sockets is None and self._ways.get(way.session_id) is way:
                del self._ways[way.session_id]
        if self._ways.get(way.session_id) is not way:
            sockets.close_unused()
            raise EgressUnavailable("the way out was closed meanwhile")
        way.take(sockets)
        self._bridges.pop(way.session_id, None)  # nsinit has removed it

    def _policy_of(self, network: Network) -> tuple[protocol.PolicyText, protocol.WayOutLimits]:
        """Return policy and limits as the process takes them. Raises `InvalidRequest`, `InvalidRule`."""
        rules = rules_in_force(network, self._settings)
        asked = attrs.asdict(network.limits, filter=lambda _attribute, value: value is not None)
        mode: Any = network.mode.value  # not `none`: the session has a way out
        limits = protocol.WayOutLimits(**asked, ask_s=self._settings.ask_timeout_s)
        return protocol.PolicyText(mode, tuple(rules.allow), tuple(rules.deny)), limits

    async def _close_as_asked(self, message: CloseWay) -> None:
        may_have_bridge = self._bridges.pop(message.session_id, None) is not None or self._may_bridge
        if may_have_bridge and not message.forget:  # with the session its bridge ends, too
            try:
                await ask_patiently(self._nsinit, call(CloseBridge, message.session_id))
            except Unavailable:
                self._nursery.start_soon(self._end_bridge, message)
                raise
        if message.session_id not in self._ways:
            await self._wait_taken()
        if message.forget or self._newest.get(message.session_id) is message:
            await self._close(message.session_id, message.forget)

    async def _close(self, session_id: str, forget: bool) -> None:
        way = self._ways.pop(session_id, None)
        if way is not None:
            way.close()
            way.settle(EgressUnavailable("the way out was closed meanwhile"))
            if way.is_attached:
                self._detached[session_id] = trio.Event()
                self._work.set()
        if (is_detached := self._detached.get(session_id)) is not None:
            await is_detached.wait()
        if forget:
            self._newest.pop(session_id, None)
            self._logs.forget(session_id)
            for type in (EventType.EGRESS_DENIED, EventType.EGRESS_LIMITED):
                self._refusals.pop((type, session_id), None)

    @property
    def _may_bridge(self) -> bool:
        return self._settings.max_mode == NetworkMode.BRIDGE

    async def _count(self, session_id: str) -> NetworkCounters:
        if (link := self._bridges.get(session_id)) is not None:
            return read_link(link)
        way = self._ways.get(session_id)
        if way is None:
            return NetworkCounters()
        if self._link is None or not way.is_attached:
            raise EgressUnavailable("the egress process is being started")
        with trio.move_on_after(_IN_FORCE_S):
            answer = await self._link.request(protocol.DescribeSession(0, session_id), protocol.Described)
            return NetworkCounters(**attrs.asdict(answer.counters))
        raise EgressUnavailable("the egress process does not answer")

    # The process ------------------------------------------------------------------------------------------------

    async def _run_process(self) -> None:
        """Find the process of an earlier daemon, or start one, with the first way out; give it every way out, and serve
        it until it ends. Raises `EgressUnavailable`, when it could not be started or configured."""
        assert self._start is not None
        reach = [f"permit={network}" for network in self._settings.permit]
        reach += [f"proxy={url}"] if (url := self._settings.upstream_proxy) else []
        found = None if self._has_taken.is_set() else find_egress(self._path)
        if found is None:
            self._has_taken.set()
            if self._processes == 0:
                await self._work.wait()
        process, log_write = found or (await self._start("egress", self._path, *reach), None)
        self._process = process
        failure: BaseException | None = None
        is_over = False
        try:
            async with trio.open_nursery() as nursery:
                link = EgressLink(process.sock, self._take)
                nursery.start_soon(self._serve, link, process, nursery.cancel_scope)
                nursery.start_soon(self._join_brokers, link)
                with trio.fail_after(_START_S):
                    is_ours = await self._configure(link, log_write)
                if is_ours:
                    self._link = link
                    self._logs.follow(link.catch_up)
                    log.info("egress_ready", extra={"sessions": len(self._ways)})
                    self._note_start()
                    await self._settle(link)
            is_over = True
        except* (trio.TooSlowError, EgressUnavailable, OSError) as group:
            failure = unwrap(group)  # raised below: what is raised here would be put into another group
        finally:
            self._link = self._process = None
            self._note_totals(protocol.EgressTotals())
            with trio.CancelScope(shield=True):
                await (process.end("egress", STOP_S) if is_over or failure is not None else self._leave(process))
            self._has_taken.set()
            for way in self._ways.values():
                way.note_attached(attached=False)
            while self._detached:
                self._detached.popitem()[1].set()
        if isinstance(failure, trio.TooSlowError):
            raise EgressUnavailable("the egress process does not answer")
        if failure is not None:
            raise EgressUnavailable(str(failure))
        log.warning("egress_ended", extra={"sessions": len(self._ways)})

    async def _join_brokers(self, link: EgressLink) -> None:
        """Bring the process together with the broker, once a session has secrets, and with each one that follows."""
        await self._wants_broker.wait()
        while True:
            try:
                broker = await self._broker.ask_again(ConnectEgress())
                with broker.fd:
                    await self._request(link, protocol.UseBroker(0), [broker.fd.fileno()])
                self._joined.set()
                try:
                    await broker.ended.wait()
                finally:
                    self._joined = trio.Event()
            except (SandkastenError, trio.TooSlowError) as error:
                log.error("broker_not_joined", extra={"error": str(error)})
                await trio.sleep(_JOIN_PAUSE_S)

    async def _configure(self, link: EgressLink, log_write: OwnedFd | None) -> bool:
        """Configure the process and take the descriptors that it has; tell whether it works as it was told. One that
        was told something else by another daemon has ended then."""
        upstream = await _read_upstream(self._settings)
        settings = protocol.Configure(0, self._settings.permit, self._settings.always_deny, upstream)
        with ExitStack() as copies:
            fds = [copies.enter_context(log_write).fileno()] if log_write is not None else []
            configured = await link.request(settings, protocol.Configured, fds)
        self._totals = configured.totals
        while (taken := await link.take_session())[0]:
            session_id, sockets = taken
            if session_id in self._ways or len(self._ways) >= _MOST_TAKEN:
                for each in sockets:
                    each.close()
                raise EgressUnavailable("the egress process gives more sessions than there are")
            # Until the session claims it: what it may reach, if another process has to serve it.
            nothing = protocol.PolicyText("allow"), protocol.WayOutLimits(), ()
            way = _Way(session_id, *nothing, sockets, configured.is_as_asked, unclaimed_since=trio.current_time())
            way.settle()
            self._ways[session_id] = way
            self._logs.open(session_id, EgressLogging.ALL)  # for the entries of the time without a daemon
        self._has_taken.set()
        if not configured.is_as_asked:
            log.warning("egress_replaced", extra={"sessions": len(self._ways)})
            await link.request(protocol.EndProcess(0), protocol.Accomplished)
        return configured.is_as_asked

    async def _serve(self, link: EgressLink, process: ChildProcess, running: trio.CancelScope) -> None:
        """Serve the link to its end; the last lines of the log say why it ended."""
        async with process.forwarding_log("egress"):
            await link.serve()
        running.cancel()

    async def _settle(self, link: EgressLink) -> None:
        """Put policies in force. Raises `EgressUnavailable` or `trio.TooSlowError`: the process is gone or too slow."""
        while True:
            self._work = trio.Event()
            for session_id, is_detached in list(self._detached.items()):
                try:
                    await self._request(link, protocol.DetachSession(0, session_id))
                except EgressUnavailable:
                    if link.is_lost:  # else the process does not have the session: it refused to attach it
                        raise
                del self._detached[session_id]
                is_detached.set()
            for way in list(self._ways.values()):
                if way.fds and not way.is_in_force and self._ways.get(way.session_id) is way:
                    await self._put_in_force(link, way)
            await self._work.wait()

    async def _put_in_force(self, link: EgressLink, way: _Way) -> None:
        settled, refusal, was_attached = way.settled, None, way.is_attached
        try:
            if way.is_attached:
                await self._request(link, protocol.SetPolicy(0, way.session_id, way.policy, way.limits, way.secrets))
            else:
                order = protocol.AttachSession(0, way.session_id, way.policy, way.limits, way.secrets)
                way.note_attached(attached=True)  # also without an answer: it is detached later then
                with ExitStack() as copies:  # of its own: the way may be closed before its turn to send has come
                    fds = [copies.enter_context(OwnedFd(os.dup(each.fileno()))).fileno() for each in way.fds]
                    await self._request(link, order, fds)
        except EgressUnavailable as error:
            log.error("way_out_refused", extra={"session_id": way.session_id, "error": str(error)})
            way.note_attached(attached=was_attached)  # a request that fails changes nothing
            refusal = error
        if settled is way.settled:
            way.settle(refusal)
        else:  # the policy was changed meanwhile
            settled.set()

    async def _request(self, link: EgressLink, request: protocol.EgressRequest, fds: Sequence[int] = ()) -> None:
        with trio.fail_after(_IN_FORCE_S):
            await link.request(request, protocol.Accomplished, fds)

    # What the process tells -------------------------------------------------------------------------------------

    def _note_start(self) -> None:
        self._processes += 1
        if self._processes > 1:
            self._metrics.egress_restarts.inc()
            self._journal.emit(EventType.EGRESS_RESTARTED, "", count=len(self._ways))

    def _take(self, notice: protocol.Entries) -> None:
        for entry in notice.entries:
            if entry.dial_ms is not None:
                self._metrics.egress_dials.observe(entry.dial_ms / 1000)
            if self._logs.get(entry.session_id) is None:
                continue  # the session has ended
            kept = self._logs.add(entry)
            if kept is not None and kept.verdict is EgressVerdict.DENIED:
                self._note_refusal(entry.session_id, kept)
            elif kept is not None and kept.verdict is EgressVerdict.ASKED:
                self._note_question(entry.session_id, kept)
        if notice.dropped:
            self._logs.note_dropped(notice.dropped)
            self._metrics.egress_dropped.inc(notice.dropped)
            log.warning("egress_entries_dropped", extra={"dropped": notice.dropped})
        if (pauses := notice.totals.pauses - self._totals.pauses) > 0:
            self._tell_of_refusals(EventType.EGRESS_LIMITED, "", pauses, reason="descriptors")
        self._note_totals(notice.totals)

    def _note_totals(self, totals: protocol.EgressTotals) -> None:
        self._metrics.note_egress(self._totals, totals)
        self._totals = totals

    def _note_refusal(self, session_id: str, entry: EgressEntry) -> None:
        type = EventType.EGRESS_LIMITED if entry.reason == Reason.LIMIT else EventType.EGRESS_DENIED
        self._tell_of_refusals(type, session_id, 1, host=entry.host, port=entry.port, reason=entry.reason)

    def _tell_of_refusals(self, type: EventType, session_id: str, count: int, **fields: object) -> None:
        """Tell of refusals now, or some seconds later together with others."""
        refusals = self._refusals.setdefault((type, session_id), _Refusals())
        refusals.add(count, fields)
        if refusals.told_at + _REFUSALS_EVERY_S <= trio.current_time():
            self._journal.emit(type, session_id, **refusals.told())

    def _note_question(self, session_id: str, entry: EgressEntry) -> None:
        """Tell of a host that connections wait for: the egress process bounds how many there are at a time."""
        self._journal.emit(
            EventType.EGRESS_ASK,
            session_id,
            host=entry.host,
            port=entry.port,
            exec_id=entry.exec_id,
            remaining_s=self._settings.ask_timeout_s,
        )

    async def _tidy(self) -> None:
        """Tell of refusals that came soon after others, some seconds later; close what sessions left that ended without
        a word, as those do whose actor died of a bug: the sockets keep the network namespace."""
        while True:
            await trio.sleep(_REFUSALS_EVERY_S)
            for session_id in {*self._ways, *self._logs, *self._newest}:
                if self._is_left(session_id):
                    log.warning("way_out_left", extra={"session_id": session_id})
                    self._nursery.start_soon(self._close, session_id, True)
            for (type, session_id), refusals in self._refusals.items():
                if refusals.count:
                    self._journal.emit(type, session_id, **refusals.told())

    def _is_left(self, session_id: str) -> bool:
        if self._directory.owns(session_id):
            way, entry = self._ways.get(session_id), self._directory.get(session_id)
            is_claimed = way is None or way.unclaimed_since is None
            return not is_claimed and entry is not None and not entry.session.network.has_way_out
        way = self._ways.get(session_id)
        return way is None or way.unclaimed_since is None or way.unclaimed_since + _CLAIM_S < trio.current_time()


async def _read_upstream(settings: EgressSettings) -> protocol.UpstreamProxy | None:
    """Return the operator's proxy with the credentials of its file. Raises `EgressUnavailable`."""
    if settings.upstream_proxy is None:
        return None
    address, port = parse_proxy(settings.upstream_proxy)
    credentials = ""
    if settings.upstream_proxy_auth is not None:
        try:
            credentials = (await trio.Path(settings.upstream_proxy_auth).read_text()).partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is no text"
            raise EgressUnavailable(f"egress.upstream_proxy_auth: {settings.upstream_proxy_auth}: {reason}") from None
        if ":" not in credentials:
            raise EgressUnavailable("egress.upstream_proxy_auth: its first line is not `user:password`")
    return protocol.UpstreamProxy(str(address), port, credentials)


@attrs.define
class _Refusals:
    """Refusals of one session, or pauses of all, that no event told of: their number and the fields of the last."""

    count: int = 0
    told_at: float = float("-inf")
    last: Mapping[str, object] = attrs.field(factory=dict)

    def add(self, count: int, last: Mapping[str, object]) -> None:
        self.count, self.last = self.count + count, last

    def told(self) -> dict[str, object]:
        """Return the fields of an event about them, and begin to count anew."""
        fields = {**self.last, "count": self.count}
        self.count, self.told_at = 0, trio.current_time()
        return fields


async def count_network(egress: Ref, session: Session) -> NetworkCounters | None:
    """Return the counters of a session's way out; None without one, or while the egress process can't be asked."""
    if session.network.has_way_out:
        with trio.move_on_after(_COUNT_S), suppress(EgressUnavailable, Unavailable):
            return await egress.ask(CountWay(session.id))
    return None
