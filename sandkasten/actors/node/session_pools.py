"""Session pools: whole sessions made ahead of creates, each pool of one image. A create that asks for what they are
takes one, and is answered without a mount or a new process.

A member is a session as a create with every default makes it, with its final id, under the status `pool_idle`. No
client finds it (`SessionDirectory.members`); admission counts it, and its lease has no end. A claim is one message to
the member's actor: the record becomes that of the client's session, then PID 1 is sent the client's variables, then the
session shows itself. `node/sandbox_pool.py` is another thing, and the second line behind this one: sandboxes without a
program and without a record, for creates that no member fits.

`Refill` says how many members are wanted and when the next one may be made. `SessionPool` is one pool, `SessionPools`
are all of them: a task for each keeps it filled while no create is under way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVarTuple

import attrs
import trio

from sandkasten.actors.core import Ref
from sandkasten.actors.services import images as images_actor
from sandkasten.actors.services.directory import Shared
from sandkasten.actors.session.actor import SessionActor
from sandkasten.actors.session.messages import Claim, Destroy, Freeze
from sandkasten.actors.session.record import age_s
from sandkasten.admission import budget as reserve
from sandkasten.admission.budget import Budget
from sandkasten.admission.plan import Resolved, resolve
from sandkasten.config import Config, PoolSize
from sandkasten.images.catalog import Image
from sandkasten.model import EventType, Session, SessionSpec
from sandkasten.model.errors import (
    Capacity,
    DiskReserve,
    InvalidImage,
    InvalidRequest,
    QuotaExceeded,
    SandkastenError,
    StoreFailed,
)
from sandkasten.model.node import PoolInfo
from sandkasten.store.sessions import SessionRecord

Ts = TypeVarTuple("Ts")

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
    """How many members a pool should have, and when the next may be made. Pure but for the clock of trio."""

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
        self.not_before = trio.current_time() + FIRST_PAUSE_S


@attrs.define(eq=False)
class Member:
    """A session that waits for its client. `image` is what it was made of: its name may be another image's by now."""

    actor: SessionActor
    image: Image
    made_at: float
    idle_since: float
    is_frozen: bool = False

    @property
    def session_id(self) -> str:
        return self.actor.session_id


def settings_of(resolved: Resolved) -> Resolved:
    """Return the settings that a create and a member must share: all that is mounted, limited or started by them. The
    others are the client's: times to live, and choices that the daemon alone keeps."""
    options = attrs.evolve(resolved.options, exec_mode="", workspace_mode="")
    return attrs.evolve(resolved, image="", ttl_s=0.0, max_lifetime_s=0.0, options=options)


def digest_of(settings: Resolved, image: Image) -> str:
    """Return a digest of a member's settings and image, which its record keeps in place of a spec's."""
    facts = [attrs.asdict(settings), attrs.asdict(image)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


class SessionPool:
    """The members of one image that can be handed out, the newest last, and the counts since the start."""

    def __init__(self, name: str, size: PoolSize, config: Config) -> None:
        self.name = name
        self.resolved = resolve(SessionSpec(image=name), config)
        self.settings = settings_of(self.resolved)
        self.refill = Refill(size)
        self.members: list[Member] = []
        self.image: Image | None = None
        """The image of that name when it was looked at last."""
        self.coming = 0
        """Members of an earlier daemon that are being adopted."""
        self.claims = self.refills = self.refill_failures = 0
        self.misses: Counter[str] = Counter()
        self.error: str | None = None
        self.bell = trio.Event()

    def ring(self) -> None:
        """Have the pool looked after."""
        self.bell.set()

    def is_of(self, name: str, image: Image) -> bool:
        """Whether a create that asks for this image, under that name, is meant for this pool."""
        return name == self.name or (self.image is not None and self.image.name == image.name)

    def lacks(self, max_age_s: float) -> bool:
        """Whether another member is wanted, be it in place of one that is too old."""
        if self.coming:
            return False
        missing = self.refill.wanted - len(self.members)
        return missing > 0 or (missing == 0 and any(self.old(max_age_s)))

    def old(self, max_age_s: float) -> Sequence[Member]:
        """Return the members that are too old."""
        since = trio.current_time() - max_age_s
        return [member for member in self.members if member.made_at <= since]


class SessionPools:
    """All session pools of the node. `start` starts the actor of a new member; `is_quiet` tells whether no create is
    under way and creates are admitted at all."""

    def __init__(
        self,
        config: Config,
        shared: Shared,
        *,
        images: Ref,
        budget: Budget,
        start: Callable[[Resolved, Image, str], SessionActor],
        start_task: Callable[..., None],
        is_quiet: Callable[[], bool],
        is_draining: Callable[[], bool],
    ) -> None:
        self._config, self._max_age_s = config, float(config.pool.max_age_seconds)
        self._directory, self._journal, self._metrics = shared.directory, shared.journal, shared.metrics
        self._images, self._budget = images, budget
        self._start, self._start_task = start, start_task
        self._is_quiet, self._is_draining = is_quiet, is_draining
        self._pools = [SessionPool(name, size, config) for name, size in config.pool.in_force.items()]
        self._rung_at = -math.inf
        self._claims = trio.CapacityLimiter(_CONCURRENT_CLAIMS)

    def __len__(self) -> int:
        """Number of members that are ready."""
        return sum(len(pool.members) for pool in self._pools)

    def infos(self) -> Sequence[PoolInfo]:
        """Return the pools as they are now."""
        return [self._info(pool) for pool in self._pools]

    def ring(self) -> None:
        """Have every pool looked after: a create has ended, or the node is drained no longer."""
        self._rung_at = trio.current_time()
        for pool in self._pools:
            pool.ring()

    # Claims -----------------------------------------------------------------------------------------------------

    async def claim(self, spec: SessionSpec, resolved: Resolved, image: Image, digest: str) -> Session | str | None:
        """Make a member the session of a create. Return the session, or the reason why there is none; None if no pool
        has that image.

        Raises:
            QuotaExceeded: the owner has used up a quota.
            InvalidRequest: PID 1 refused the environment.
            StoreFailed: the claim could not be recorded.
        """
        pool = next((pool for pool in self._pools if pool.is_of(resolved.image, image)), None)
        if pool is None:
            return None
        if spec.workspace_id is not None or settings_of(resolved) != pool.settings:
            return self._miss(pool, MISMATCH)
        pool.refill.note_create()
        reason, tries = EMPTY, _TRIES
        async with self._claims:
            while tries and pool.members:
                member = pool.members.pop()
                if member.image != image:
                    reason = STALE
                    self._start_task(self._end, member, "its image was replaced")
                    continue
                session = await self._hand_out(pool, member, spec, resolved, digest)
                if session is not None:
                    pool.claims += 1
                    self._metrics.pool_claims(pool.name).inc()
                    return session
                reason, tries = DEAD, tries - 1
        return self._miss(pool, reason)

    async def _hand_out(
        self, pool: SessionPool, member: Member, spec: SessionSpec, resolved: Resolved, digest: str
    ) -> Session | None:
        """Return the member as the session of a client, None if it is dead. It is no member any more in either case."""
        if member.actor.has_died.is_set():
            return None
        try:
            self._budget.take_over(member.session_id, spec.key_id)
        except QuotaExceeded:
            pool.members.append(member)
            raise
        claim = Claim(
            changes={
                "image": resolved.image,
                "ttl_s": resolved.ttl_s,
                "max_lifetime_s": resolved.max_lifetime_s,
                "labels": dict(spec.labels),
                "key_id": spec.key_id,
                "options": resolved.options,
                "acquire_source": POOL,
                "acquire_detail": None,
            },
            env=spec.env,
            spec_digest=digest,
            idempotency_key=spec.idempotency_key,
        )
        try:
            return await member.actor.ref.ask(claim)
        except SandkastenError as error:
            self._budget.release(member.session_id)  # before its actor does: the next one may need the share
            if isinstance(error, InvalidRequest | StoreFailed):
                raise
            log.warning("pool_member_lost", extra={"session_id": member.session_id, "error": str(error)})
            return None

    def _miss(self, pool: SessionPool, reason: str) -> str:
        pool.misses[reason] += 1
        self._metrics.pool_misses(pool.name, reason).inc()
        return reason

    async def give_up_one(self) -> bool:
        """End one idle member, for a create that does not fit beside all of them. Return False if there is none."""
        pool = max(self._pools, key=lambda each: len(each.members), default=None)
        if pool is None or not pool.members:
            return False
        pool.refill.note_no_room()
        await self._end(pool.members.pop(0), "a create needs its place")
        return True

    def forget(self, session_id: str) -> None:
        """Have the pool of a member that ended go on without it."""
        for pool in self._pools:
            pool.members = [each for each in pool.members if each.session_id != session_id]
            pool.ring()

    # Refills ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look after the pools from now on."""
        for pool in self._pools:
            self._start_task(self._tend, pool)

    async def _tend(self, pool: SessionPool) -> None:
        while True:
            pool.bell = trio.Event()
            await self._look(pool)
            while pool.lacks(self._max_age_s) and trio.current_time() >= self._due(pool) and self._is_quiet():
                await self._make(pool)
                await self._look(pool)
            with trio.move_on_at(self._next_look(pool)):
                await pool.bell.wait()
            await trio.sleep(_QUIET_S)

    def _next_look(self, pool: SessionPool) -> float:
        """Return the moment at which a pool needs to be looked after, if nothing happens before."""
        now = trio.current_time()
        moments = [now + LOOK_EVERY_S]
        moments += [each.idle_since + FREEZE_AFTER_S for each in pool.members if not each.is_frozen]
        if not pool.lacks(self._max_age_s):
            moments += [each.made_at + self._max_age_s for each in pool.members]
        elif (due := self._due(pool)) > now:
            moments.append(due)
        return min(moments)

    def _due(self, pool: SessionPool) -> float:
        """Return the moment at which the next member may be made, if no create comes before."""
        rest_s = _REST_S if 2 * len(pool.members) > pool.refill.wanted else _QUIET_S
        return max(pool.refill.not_before, self._rung_at + rest_s)

    async def _look(self, pool: SessionPool) -> None:
        """End the members that are dead, of another image, or old and replaced; freeze those that wait for long."""
        try:
            pool.image = await self._images.ask(images_actor.Resolve(pool.name))
        except InvalidImage:
            pool.image = None
        except SandkastenError as error:  # the images actor is being started anew
            log.info("pool_image_not_resolved", extra={"image": pool.name, "error": str(error)})
            return
        pool.members = [each for each in pool.members if not each.actor.has_died.is_set()]
        for member in [each for each in pool.members if each.image != pool.image]:
            self._retire(pool, member, "its image was replaced or deleted")
        for member in pool.old(self._max_age_s):
            if len(pool.members) > pool.refill.wanted:
                self._retire(pool, member, "it is old")
        for member in [each for each in pool.members if not each.is_frozen]:
            if trio.current_time() >= member.idle_since + FREEZE_AFTER_S:
                await self._freeze(member)

    def _retire(self, pool: SessionPool, member: Member, reason: str) -> None:
        pool.members.remove(member)
        self._start_task(self._end, member, reason)

    async def _freeze(self, member: Member) -> None:
        member.is_frozen = True
        try:
            await member.actor.ref.ask(Freeze())
        except SandkastenError as error:  # claimed, or dying
            log.info("pool_member_not_frozen", extra={"session_id": member.session_id, "error": str(error)})

    async def _end(self, member: Member, reason: str) -> None:
        entry = self._directory.members.get(member.session_id)
        try:
            await member.actor.ref.ask(Destroy(reason))
        except SandkastenError as error:
            log.info("pool_member_ended_before", extra={"session_id": member.session_id, "error": str(error)})
        if entry is not None:
            await entry.ended.wait()

    async def _make(self, pool: SessionPool) -> None:
        """Make one member, as a create does, or pause the refills."""
        began, place = trio.current_time(), object()
        try:
            reserve.check(self._config.data_dir, self._config.disk)
            image = await self._images.ask(images_actor.Resolve(pool.name))
            self._budget.admit(place, pool.resolved.limits)
            try:
                actor = self._start(pool.resolved, image, digest_of(pool.settings, image))
            finally:
                self._budget.release(place)
            await actor.ready.wait()
        except SandkastenError as error:
            self._note_failure(pool, error)
            return
        now = trio.current_time()
        pool.refill.note_made(now - began)
        pool.refills += 1
        pool.error = None
        self._metrics.pool_refills(pool.name, "ok").inc()
        pool.members.append(Member(actor, image, made_at=now, idle_since=now))

    def _note_failure(self, pool: SessionPool, error: SandkastenError) -> None:
        if self._is_draining():
            return
        if isinstance(error, DiskReserve) or (isinstance(error, Capacity) and "resource" in error.details):
            pool.refill.note_no_room()
            return
        pool.error = str(error)
        pool.refill_failures += 1
        self._metrics.pool_refills(pool.name, "failed").inc()
        log.warning("pool_not_refilled", extra={"image": pool.name, "error": str(error)})
        if pool.refill.note_failure():
            facts: Mapping[str, Any] = {"failures": pool.refill.failures, "error": str(error)}
            self._journal.emit(EventType.POOL_FAILING, "", image=pool.name, **facts)

    # After a start ----------------------------------------------------------------------------------------------

    async def wanted_members(self, records: Sequence[SessionRecord]) -> Sequence[SessionRecord]:
        """Return those members of an earlier daemon that the configuration still asks for. They are to be adopted, and
        given to `receive`."""
        wanted: list[SessionRecord] = []
        for pool in self._pools:
            await self._look(pool)
            if pool.image is None:
                continue
            digest = digest_of(pool.settings, pool.image)
            mine = [each for each in records if each.spec_digest == digest and age_s(each) < self._max_age_s]
            mine = mine[: pool.refill.size.size]
            pool.coming = len(mine)
            wanted += mine
        return wanted

    async def receive(self, actor: SessionActor) -> None:
        """Take a member of an earlier daemon into its pool as soon as it is adopted."""
        for pool in self._pools:
            if pool.image is not None and digest_of(pool.settings, pool.image) == actor.record.spec_digest:
                break
        else:
            raise AssertionError("only wanted members are adopted")
        try:
            await actor.ready.wait()
            now = trio.current_time()
            pool.members.append(Member(actor, pool.image, made_at=now - age_s(actor.record), idle_since=now))
        except SandkastenError as error:
            log.warning("pool_member_not_adopted", extra={"session_id": actor.session_id, "error": str(error)})
        finally:
            pool.coming -= 1
            pool.ring()

    def _info(self, pool: SessionPool) -> PoolInfo:
        wanted, ready = pool.refill.wanted, len(pool.members)
        if self._is_draining():
            state = "draining"
        elif pool.refill.is_failing:
            state = "failing"
        else:
            state = "ready" if ready >= wanted else "filling"
        return PoolInfo(
            image=pool.name,
            state=state,
            size=pool.refill.size.size,
            max=pool.refill.size.most,
            wanted=wanted,
            ready=ready,
            frozen=sum(each.is_frozen for each in pool.members),
            claims=pool.claims,
            misses=dict(pool.misses),
            refills=pool.refills,
            refill_failures=pool.refill_failures,
            error=pool.error,
        )
