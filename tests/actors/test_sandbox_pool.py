"""The sandbox pool: how many sandboxes it has, and that one with an image goes only to a create that asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio

from nsinit.wire.protocol import MountImage, Prepare
from sandkasten.actors.core import Actor, Ref
from sandkasten.actors.node.sandbox_pool import MountedImage, SandboxPool
from sandkasten.actors.services.directory import SessionDirectory
from sandkasten.actors.services.nsinit import Call
from sandkasten.admission.plan import resolve
from sandkasten.config import Config
from sandkasten.errors import BuildFailed
from sandkasten.images.catalog import Image
from sandkasten.model import Limits, SessionSpec

IMAGE = Image("python", "rootfs", "2026-01-02T03:04:05Z", "tests")


class FakeNsinit(Actor):
    """An nsinit that obeys every request but those of the types in `refused`."""

    def __init__(self) -> None:
        super().__init__(Ref("nsinit"))
        self.told: list[str] = []
        self.refused: set[type] = set()
        self.mount_s = 0.0

    async def handle(self, message: Call[Any]) -> None:
        self.told.append(type(message.request).__name__)
        if isinstance(message.request, MountImage):
            await trio.sleep(self.mount_s)
        if type(message.request) in self.refused:
            raise BuildFailed("no", stage="overlay root")


@attrs.define
class Yard:
    """A pool, and what became of its sandboxes."""

    nsinit: FakeNsinit
    pool: SandboxPool = attrs.field(init=False)
    reaped: list[str] = attrs.field(factory=list)
    reap_s: float = 0

    async def reap(self, session_id: str) -> None:
        await trio.sleep(self.reap_s)
        self.reaped.append(session_id)

    async def refill(self) -> None:
        await self.pool.refill(lambda: True)

    def take(self, **changes: Any) -> str | None:
        return self.pool.take(wanted(**changes))


def wanted(image: Image = IMAGE, **limits: Any) -> MountedImage:
    spec = SessionSpec(limits=attrs.evolve(Config().defaults.limits, **limits))
    return MountedImage.of(resolve(spec, Config()), image)


@pytest.fixture
async def yard(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Yard]:
    """With room for two."""
    yard = Yard(FakeNsinit())
    ref: Ref = await nursery.start(yard.nsinit.run)
    ids: Callable[[], str] = iter(f"{number:024x}" for number in range(100)).__next__
    limits: Limits = Config().defaults.limits
    yard.pool = SandboxPool(ref, SessionDirectory(), wanted=2, limits=limits, new_id=ids, reap=yard.reap)
    yield yard
    nursery.cancel_scope.cancel()


async def test_no_image_is_mounted_before_anybody_asked(yard: Yard) -> None:
    """There is nothing to guess from."""
    await yard.refill()
    await yard.refill()
    assert (yard.nsinit.told, len(yard.pool)) == (["Prepare", "Prepare"], 2)


async def test_one_has_the_image_as_the_last_create_asked_and_one_stays_blank(yard: Yard) -> None:
    """A create like the last one gets the sandbox with the image; any other create gets the blank one."""
    await yard.refill()
    assert yard.take() is not None
    await yard.refill()
    assert yard.nsinit.told == ["Prepare", "Prepare", "Prepare", "MountImage"]
    assert len(yard.pool) == 2
    other = yard.take(memory_mb=1024)
    same = yard.take()
    assert None not in (other, same)
    assert other != same
    assert yard.take() is None
    assert yard.reaped == []


async def test_an_image_that_is_forgotten_is_mounted_no_more(yard: Yard) -> None:
    """The sandbox of the image is reaped before the answer, a mount under way included; another image's stays."""
    await yard.refill()
    yard.take()
    await yard.refill()
    await yard.pool.forget("other")
    assert yard.reaped == []
    await yard.pool.forget("python")
    assert len(yard.reaped) == 1
    await yard.refill()
    await yard.pool.forget("python")
    assert (yard.nsinit.told.count("MountImage"), len(yard.reaped), len(yard.pool)) == (1, 1, 2)
    yard.take()
    yard.nsinit.mount_s = 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(yard.refill)
        await trio.sleep(0.5)
        await yard.pool.forget("python")
        assert (yard.nsinit.told.count("MountImage"), len(yard.reaped), len(yard.pool)) == (2, 2, 1)


async def test_an_image_that_is_being_discarded_is_forgotten_when_it_is_gone(yard: Yard) -> None:
    """A delete of the image that comes next finds it free."""
    await yard.refill()
    yard.take()
    await yard.refill()
    yard.take(memory_mb=1024)
    yard.reap_s = 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(yard.refill)
        await trio.sleep(0.5)
        assert yard.reaped == []
        await yard.pool.forget("python")
        assert len(yard.reaped) == 1


@pytest.mark.parametrize(
    "other",
    [{"memory_mb": 1024}, {"disk_mb": 64}, {"tmp_mb": 1}, {"image": attrs.evolve(IMAGE, created_at="later")}],
    ids=lambda other: next(iter(other)),
)
async def test_what_nobody_asks_for_any_more_is_discarded(yard: Yard, other: dict[str, Any]) -> None:
    """Also an image whose name another image has now. What takes its place has what was asked last."""
    await yard.refill()
    yard.take()
    await yard.refill()
    assert yard.take(**other) is not None
    assert yard.take(**other) is None
    await yard.refill()
    assert len(yard.reaped) == 1
    assert yard.take(**other) is not None
    assert yard.take(**other) not in (None, *yard.reaped)


async def test_what_is_not_mounted_yet_makes_no_difference(yard: Yard) -> None:
    """Processors, processes and open files are limits of what runs."""
    await yard.refill()
    yard.take()
    await yard.refill()
    assert None not in (yard.take(cpu=2.0, pids=99, open_files=2048), yard.take(cpu=2.0))
    assert yard.reaped == []


async def test_an_image_that_can_t_be_mounted_costs_one_sandbox_a_time(yard: Yard) -> None:
    """nsinit has removed it; the create that asks for that image will say why."""
    yard.nsinit.refused = {MountImage}
    await yard.refill()
    yard.take()
    await yard.refill()
    assert (len(yard.reaped), len(yard.pool)) == (1, 1)
    yard.nsinit.refused = {Prepare}
    yard.nsinit.told.clear()
    await yard.refill()
    assert yard.nsinit.told == ["Prepare"]


async def test_those_of_an_nsinit_that_died_are_given_to_nobody(yard: Yard) -> None:
    """Blank or not: they died with it."""
    await yard.refill()
    yard.take()
    await yard.refill()
    yard.pool._nsinit.incarnation += 1
    assert yard.take() is None
    await yard.refill()
    assert len(yard.reaped) == 2
