"""Session pools: whole sessions made ahead of creates, each pool of one image. A create whose request a member
fits takes the member, and is answered without a mount or a new process.

A member is a session as a create with every default makes it, with its final id, under the status `pool_idle`. No
client finds it (`SessionDirectory.members`); admission counts it, and its lease has no end. It may have a process
running (`WarmProcess`), and then is for creates that ask for that process. A claim is one message to the member's
actor: the record becomes that of the client's session, then PID 1 is sent the client's variables, then the session
shows itself. `node/sandbox_pool.py` serves the creates that no member fits: it keeps sandboxes without a program and
without a record.

`Refill` says how many members are wanted and when the next one may be made. `SessionPool` is one pool with the task
that keeps it filled while no create is under way, `SessionPools` are all of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.services import images as images_actor
from sandkasten.actors.services.directory import Shared
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.session.messages import Claim, Destroy, Freeze, WarmUp
from sandkasten.actors.session.record import age_s
from sandkasten.admission import budget as reserve
from sandkasten.admission.budget import Budget
from sandkasten.admission.plan import Resolved, resolve
from sandkasten.admission.secrets import NO_SECRETS
from sandkasten.config import Config, PoolSize
from sandkasten.errors import (
    Capacity,
    Conflict,
    DiskReserve,
    InvalidImage,
    InvalidRequest,
    QuotaExceeded,
    SandkastenError,
    StoreFailed,
)
from sandkasten.images.catalog import Image
from sandkasten.model import EventType, Session, SessionSpec, WarmProcess
from sandkasten.model.network import Network
from sandkasten.model.node import PoolInfo
from sandkasten.store.sessions import SessionRecord

log = logging.getLogger(__name__)

POOL = "pool"
"""`acquire_source` of a session that was a member of a pool."""

EMPTY, STALE, DEAD, MISMATCH = "pool_empty", "pool_stale", "pool_dead", "pool_mismatch"
"""Reasons of a create that got no member of the pool of its image, as its `acquire_detail`: there was none, or only
members of an image that was replaced, or only dead ones; or it asks for something that no member is."""

MAX_FAILURES = 5
"""Failures in a row after which a pool is failing: an event tells of it, and a member is tried for each `MAX_PAUSE_S`.
"""

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
FREEZE_AFTER_S = 10.0
LOOK_EVERY_S = 60.0
_WINDOW_S = 60.0
_MAX_COUNTED = 10_000
_QUIET_S, _REST_S = 0.02, 0.25
"""Pauses of refills after a create: of a pool that is half empty, and of any other. A client runs something soon after
its create, and a refill takes a core for the time of one."""

_TRIES = 3
"""Members that may prove dead at hand-out before a create goes without."""

_CONCURRENT_CLAIMS = 8
"""Members being handed out at a time. Each has a few milliseconds to answer, and a burst must not starve all of them.
"""


class Refill:
    """Number of members that a pool should have, and the moment of the next try. Pure but for the clock of trio."""

    def __init__(self, size: PoolSize) -> None:
        self.size = size
        self.failures = 0
        """Failures in a row."""
        self.not_before = -math.inf
        self._asked_at: deque[float] = deque(maxlen=_MAX_COUNTED)
        self._made_in_s = 0.0

    @property
    def wanted(self) -> int:
        """Number of members to have: `size`, and as many more as creates take while one is made."""
        since = trio.current_time() - _WINDOW_S
        while self._asked_at and self._asked_at[0] < since:
            self._asked_at.popleft()
        taken = math.ceil(len(self._asked_at) / _WINDOW_S * self._made_in_s)
        return min(self.size.size + taken, self.size.most)

    @property
    def is_failing(self) -> bool:
        return self.failures >= MAX_FAILURES

    def note_create(self) -> None:
        """Count a create that wanted a member."""
        self._asked_at.append(trio.current_time())

    def note_made(self, took_s: float) -> None:
        """Note that a member was made in `took_s` seconds."""
        self._made_in_s = (self._made_in_s + took_s) / 2 if self._made_in_s else took_s
        self.failures = 0

    def note_failure(self) -> bool:
        """Pause after a failure, twice as long as after the one before; return whether the pool is failing now."""
        self.failures += 1
        pause_s = MAX_PAUSE_S if self.is_failing else FIRST_PAUSE_S * 2 ** (self.failures - 1)
        self.not_before = trio.current_time() + pause_s
        return self.failures == MAX_FAILURES

    def note_no_room(self) -> None:
        """Pause because the node has no room, which is no failure of the pool."""
        self.not_before = max(self.not_before, trio.current_time() + FIRST_PAUSE_S)


@attrs.define(eq=False)
class PoolMember:
    """A session that waits for its client. `image` is what it was made of: its name may be another image's by now."""

    actor: SessionActor
    image: Image
    made_at: float
    idle_since: float
    is_frozen: bool = False

    @property
    def session_id(self) -> str:
        return self.actor.session_id

    async def freeze(self) -> None:
        """Freeze the member, unless it is being claimed or dies."""
        try:
            await self.actor.ref.ask(Freeze())
            self.is_frozen = True
        except SandkastenError as error:
            self.idle_since = trio.current_time()  # it is tried again as late as the first time
            log.info("pool_member_not_frozen", extra={"session_id": self.session_id, "error": str(error)})


def settings_of(resolved: Resolved) -> Resolved:
    """Return the settings that a create and a member must share: all that is mounted, limited or started by them. The
    others are the client's: times to live, choices that the daemon alone keeps, and the network, which a member gets
    with the claim."""
    options = attrs.evolve(resolved.options, exec_mode="", workspace_mode="", stop_grace_ms=0, streams=None, at_end="")
    return attrs.evolve(
        resolved, image="", ttl_s=0.0, max_lifetime_s=0.0, options=options, network=Network(), secrets=NO_SECRETS
    )


def digest_of(settings: Resolved, image: Image, warm: WarmProcess | None = None) -> str:
    """Return a digest of a member's settings, image and process, which its record keeps in place of a spec's."""
    facts = [attrs.asdict(settings), attrs.asdict(image), warm and attrs.asdict(warm)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


@attrs.frozen(kw_only=True)
class PoolServices:
    """The rest of the node, as a pool needs it. `warm` are processes that members have running, by the names of pools.
    `start` starts the actor of a new member; `is_quiet` tells whether no create is under way and creates are admitted
    at all."""

    config: Config
    shared: Shared
    images: Ref
    budget: Budget
    warm: Mapping[str, WarmProcess]
    start: Callable[[Resolved, Image, str], SessionActor]
    start_task: Callable[..., None]
    is_quiet: Callable[[], bool]
    is_draining: Callable[[], bool]


class SessionPool:
    """The members of one image that can be handed out, the newest last, and the counts since the start."""

    def __init__(self, name: str, size: PoolSize, services: PoolServices) -> None:
        self._name, self._services = name, services
        self._metrics = services.shared.metrics
        self._max_age_s = float(services.config.pool.max_age_seconds)
        self._warm = services.warm.get(name)
        warm = None if self._warm is None else self._warm.spec.process_id
        self._resolved = resolve(SessionSpec(image=name, account=size.account, warm=warm), services.config)
        self._settings = settings_of(self._resolved)
        self._refill = Refill(size)
        self._members: list[PoolMember] = []
        self._image: Image | None = None
        """The image of that name when it was looked at last."""
        self._coming: set[str] = set()
        """Ids of members of an earlier daemon that are being adopted."""
        self._warming: list[SessionActor] = []
        """Members that are being built or adopted, or whose process is not ready yet."""
        self._claimed = self._refills = self._refill_failures = 0
        self._misses: Counter[str] = Counter()
        self._error: str | None = None
        self._rung_at = -math.inf
        self._bell = trio.Event()

    def __len__(self) -> int:
        return len(self._members)

    def is_of(self, name: str, image: Image) -> bool:
        """Whether a create that asks for this image, under that name, is meant for this pool."""
        return name == self._name or (self._image is not None and self._image.name == image.name)

    def ring(self) -> None:
        """Have the pool looked after: a create has ended, or the node is drained no longer."""
        self._rung_at = trio.current_time()
        self._bell.set()

    def forget(self, session_id: str) -> None:
        """Go on without a member that ended."""
        self._members = [each for each in self._members if each.session_id != session_id]
        self._bell.set()

    @property
    def info(self) -> PoolInfo:
        """State and size of the pool, as answers and metrics tell them."""
        refill, ready = self._refill, len(self._members)
        if self._services.is_draining():
            state = "draining"
        elif refill.is_failing:
            state = "failing"
        else:
            state = "ready" if ready >= refill.wanted else "filling"
        return PoolInfo(
            image=self._name,
            state=state,
            size=refill.size.size,
            max=refill.size.most,
            wanted=refill.wanted,
            ready=ready,
            frozen=sum(each.is_frozen for each in self._members),
            claims=self._claimed,
            misses=dict(self._misses),
            refills=self._refills,
            refill_failures=self._refill_failures,
            error=self._error,
        )

    # Claims -----------------------------------------------------------------------------------------------------

    def fits(self, spec: SessionSpec, resolved: Resolved) -> bool:
        """Whether members are what a create asks for."""
        asked = settings_of(resolved)
        if self._warm is None and asked.warm is not None:  # a member without a process serves who would have one, too
            asked = attrs.evolve(asked, warm=None)
        return spec.workspace_id is None and asked == self._settings

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Of pools that fit, the greatest is claimed from: one with members, with a process, with many members."""
        return bool(self._members), self._warm is not None, len(self._members)

    async def claim(self, spec: SessionSpec, resolved: Resolved, image: Image, digest: str) -> Session | str:
        """Make a member the session of a create that `fits`; return the session, or the reason why there is none."""
        reason, tries = EMPTY, _TRIES
        while tries and self._members:
            member = self._members.pop()
            if member.image != image:
                reason = STALE
                self._services.start_task(self._end, member.actor, "its image was replaced")
                continue
            session = await self._hand_out(member, spec, resolved.of_image(image.config), digest)
            if session is not None:
                self._refill.note_create()
                self._claimed += 1
                self._metrics.pool_claims(self._name).inc()
                return session
            reason, tries = DEAD, tries - 1
        self._refill.note_create()
        return self.miss(reason)

    async def _hand_out(self, member: PoolMember, spec: SessionSpec, resolved: Resolved, digest: str) -> Session | None:
        """Return the member as the session of a client, None if it is dead. It is no member any more in either case."""
        if member.actor.has_died.is_set():
            return None
        budget = self._services.budget
        try:
            budget.take_over(member.session_id, spec.key_id)
        except QuotaExceeded:
            self._members.append(member)
            raise
        claim = Claim(
            changes={
                "image": resolved.image,
                "ttl_s": resolved.ttl_s,
                "max_lifetime_s": resolved.max_lifetime_s,
                "labels": dict(spec.labels),
                "key_id": spec.key_id,
                "options": resolved.options,
                "network": resolved.network,
                "acquire_source": POOL,
                "acquire_detail": None,
            },
            env=resolved.environment(member.session_id, spec),
            spec_digest=digest,
            idempotency_key=spec.idempotency_key,
            publish=spec.publish,
        )
        try:
            return await member.actor.ref.ask(claim)
        except SandkastenError as error:
            budget.release(member.session_id)  # before its actor does: the next one may need the share
            has_no_port = spec.publish and type(error) is Capacity  # subclasses are about the member
            if has_no_port or isinstance(error, InvalidRequest | StoreFailed | Conflict):
                raise
            log.warning("pool_member_lost", extra={"session_id": member.session_id, "error": str(error)})
            return None

    def miss(self, reason: str) -> str:
        """Count a create that gets no member, and return the reason."""
        self._misses[reason] += 1
        self._metrics.pool_misses(self._name, reason).inc()
        return reason

    @property
    def idle(self) -> Sequence[str]:
        """Ids of the members that nobody has, be they ready or not."""
        return [each.session_id for each in (*(member.actor for member in self._members), *self._warming)]

    async def give_up_one(self) -> bool:
        """End the oldest member, for a create that does not fit beside it. Return False if there is none."""
        if not self.idle:
            return False
        self._refill.note_no_room()
        actor = self._members.pop(0).actor if self._members else self._warming.pop(0)
        await self._end(actor, "a create needs its place")
        return True

    # Refills ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the pool filled for ever."""
        while True:
            self._bell = trio.Event()
            await self._look()
            while self._lacks() and trio.current_time() >= self._due and self._services.is_quiet():
                await self._make()
                await self._look()
            with trio.move_on_at(self._next_look()):
                await self._bell.wait()
            await trio.sleep(_QUIET_S)

    def _lacks(self) -> bool:
        """Whether another member is wanted, be it in place of one that is too old."""
        missing = self._refill.wanted - len(self._members) - len(self._coming)
        return missing > 0 or (missing == 0 and bool(self._old()))

    def _old(self) -> Sequence[PoolMember]:
        since = trio.current_time() - self._max_age_s
        return [member for member in self._members if member.made_at <= since]

    @property
    def _due(self) -> float:
        """The moment at which the next member may be made, if no create comes before."""
        rest_s = _REST_S if 2 * len(self._members) > self._refill.wanted else _QUIET_S
        return max(self._refill.not_before, self._rung_at + rest_s)

    def _next_look(self) -> float:
        """Return the moment at which the pool needs to be looked after, if nothing happens before."""
        now = trio.current_time()
        moments = [now + LOOK_EVERY_S]
        moments += [each.idle_since + FREEZE_AFTER_S for each in self._members if not each.is_frozen]
        if not self._lacks():
            moments += [end for each in self._members if (end := each.made_at + self._max_age_s) > now]
        elif self._due > now:
            moments.append(self._due)
        return min(moments)

    async def _look(self) -> None:
        """End the members that are of another image, or old and replaced; freeze those that wait for long."""
        try:
            self._image = await self._services.images.ask_again(images_actor.Resolve(self._name))
        except InvalidImage:
            self._image = None
        except SandkastenError as error:  # the images actor is being started anew
            log.info("pool_image_not_resolved", extra={"image": self._name, "error": str(error)})
            return
        for member in [each for each in self._members if each.image != self._image]:
            self._retire(member, "its image was replaced or deleted")
        for member in self._old():
            if len(self._members) > self._refill.wanted:
                self._retire(member, "it is old")
        for member in [each for each in self._members if not each.is_frozen]:
            if trio.current_time() >= member.idle_since + FREEZE_AFTER_S:
                await member.freeze()

    def _retire(self, member: PoolMember, reason: str) -> None:
        self._members.remove(member)
        self._services.start_task(self._end, member.actor, reason)

    async def _end(self, actor: SessionActor, reason: str) -> None:
        entry = self._services.shared.directory.members.get(actor.session_id)
        try:
            await actor.ref.ask(Destroy(reason))
        except SandkastenError as error:
            log.info("pool_member_ended_before", extra={"session_id": actor.session_id, "error": str(error)})
        if entry is not None:
            await entry.ended.wait()

    async def _make(self) -> None:
        """Make one member, as a create does, or pause the refills."""
        services, began, place = self._services, trio.current_time(), object()
        try:
            reserve.check(services.config.data_dir, services.config.disk)
            image = await services.images.ask_again(images_actor.Resolve(self._name))
            if services.is_draining():  # since the question
                return
            services.budget.admit(place, self._resolved.limits)
            try:
                actor = services.start(self._resolved, image, digest_of(self._settings, image, self._warm))
            finally:
                services.budget.release(place)  # counted under its id from here
            await self._have_ready(actor)
        except SandkastenError as error:
            self._note_failure(error)
            return
        now = trio.current_time()
        self._refill.note_made(now - began)
        self._refills += 1
        self._error = None
        self._metrics.pool_refills(self._name, "ok").inc()
        self._take(actor, image, made_at=now)

    async def _have_ready(self, actor: SessionActor) -> None:
        """Wait for a member, and have the pool's process ready in it. Ends the member, and raises, if the process does
        not become so. Raises `Capacity` if a create got its place meanwhile."""
        self._warming.append(actor)
        failure: SandkastenError | None = None
        is_built = False
        try:
            await actor.ready.wait()
            is_built = True
            if self._warm is not None and actor in self._warming:
                await actor.ref.ask(WarmUp(self._warm))
        except SandkastenError as error:
            failure = error
        finally:
            was_given_up = actor not in self._warming
            self._warming = [each for each in self._warming if each is not actor]
        if was_given_up:
            raise Capacity("a create needed the member's place", resource="sessions") from failure
        if failure is not None:
            if is_built:
                self._services.start_task(self._end, actor, str(failure))
            raise failure

    def _take(self, actor: SessionActor, image: Image, *, made_at: float) -> None:
        """Have a member ready, unless it has died before."""
        if not actor.has_died.is_set():
            self._members.append(PoolMember(actor, image, made_at, trio.current_time()))

    def _note_failure(self, error: SandkastenError) -> None:
        if self._services.is_draining():
            return
        if isinstance(error, DiskReserve) or (isinstance(error, Capacity) and "resource" in error.details):
            self._refill.note_no_room()
            return
        self._error = str(error)
        self._refill_failures += 1
        self._metrics.pool_refills(self._name, "failed").inc()
        log.warning("pool_not_refilled", extra={"image": self._name, "error": str(error)})
        if self._refill.note_failure():
            facts: Mapping[str, Any] = {"failures": self._refill.failures, "error": str(error)}
            self._services.shared.journal.emit(EventType.POOL_FAILING, "", image=self._name, **facts)

    # After a start ----------------------------------------------------------------------------------------------

    async def wanted_members(self, records: Sequence[SessionRecord]) -> Sequence[SessionRecord]:
        """Return those members of an earlier daemon that belong here, to be adopted and given to `receive`."""
        await self._look()
        mine = [each for each in records if self._is_like(each) and age_s(each) < self._max_age_s]
        mine = mine[: self._refill.size.size]
        self._coming = {each.session.id for each in mine}
        return mine

    def _is_like(self, record: SessionRecord) -> bool:
        return self._image is not None and record.spec_digest == digest_of(self._settings, self._image, self._warm)

    async def receive(self, actor: SessionActor) -> bool:
        """Take a member of an earlier daemon as soon as it is adopted; return False if it belongs to another pool."""
        if actor.session_id not in self._coming:
            return False
        image = self._image
        try:
            await self._have_ready(actor)
            if image is None or not self._is_like(actor.record):
                self._services.start_task(self._end, actor, "its image was replaced or deleted")
                return True
            self._take(actor, image, made_at=trio.current_time() - age_s(actor.record))
        except SandkastenError as error:
            log.warning("pool_member_not_adopted", extra={"session_id": actor.session_id, "error": str(error)})
        finally:
            self._coming.discard(actor.session_id)
            self._bell.set()
        return True


class SessionPools:
    """The pools of sessions that the configuration names, one for each image."""

    def __init__(self, services: PoolServices) -> None:
        pools = services.config.pool.in_force
        self._pools = [SessionPool(name, size, services) for name, size in pools.items()]
        self._start_task = services.start_task
        self._claims = trio.CapacityLimiter(_CONCURRENT_CLAIMS)

    def __len__(self) -> int:
        """Return the number of members that are ready."""
        return sum(map(len, self._pools))

    @property
    def idle(self) -> Sequence[str]:
        """Ids of the members that nobody has."""
        return [session_id for pool in self._pools for session_id in pool.idle]

    @property
    def infos(self) -> Sequence[PoolInfo]:
        """The pools as they are now."""
        return [pool.info for pool in self._pools]

    def run(self) -> None:
        """Look after the pools from now on."""
        for pool in self._pools:
            self._start_task(pool.run)

    def ring(self) -> None:
        """Have every pool looked after: a create has ended, or the node is drained no longer."""
        for pool in self._pools:
            pool.ring()

    def forget(self, session_id: str) -> None:
        """Go on without a member that ended."""
        for pool in self._pools:
            pool.forget(session_id)

    async def claim(self, spec: SessionSpec, resolved: Resolved, image: Image, digest: str) -> Session | str | None:
        """Make a member the session of a create. Return the session, or the reason why there is none; None if no pool
        has that image.

        Raises:
            QuotaExceeded: the owner has used up a quota.
            InvalidRequest: PID 1 refused the environment.
            StoreFailed: the claim could not be recorded.
        """
        mine = [pool for pool in self._pools if pool.is_of(resolved.image, image)]
        if not mine:
            return None
        fitting = [pool for pool in mine if pool.fits(spec, resolved)]
        if not fitting:
            return mine[0].miss(MISMATCH)
        pool = max(fitting, key=lambda each: each.rank)
        try:
            self._claims.acquire_nowait()
        except trio.WouldBlock:
            await self._claims.acquire()
        try:
            return await pool.claim(spec, resolved, image, digest)
        finally:
            self._claims.release()

    async def give_up_one(self) -> bool:
        """End one member of the largest pool, for a create that does not fit beside all. Return False if there is
        none."""
        return bool(self._pools) and await max(self._pools, key=lambda pool: len(pool.idle)).give_up_one()

    async def wanted_members(self, records: Sequence[SessionRecord]) -> Sequence[SessionRecord]:
        """Return those members of an earlier daemon that the configuration still asks for. They are to be adopted, and
        given to `receive`."""
        wanted: dict[str, SessionRecord] = {}
        for pool in self._pools:  # two may want the same: those of an image and its alias
            mine = await pool.wanted_members([each for each in records if each.session.id not in wanted])
            wanted.update({each.session.id: each for each in mine})
        return list(wanted.values())

    async def receive(self, actor: SessionActor) -> None:
        """Have a member of an earlier daemon in its pool as soon as it is adopted."""
        for pool in self._pools:
            if await pool.receive(actor):
                return
