"""The daemon's whole tree over an nsinit and PID 1s in the test's own process: no root, no kernel, no waiting."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import StopOrder, open_tree
from sandkasten.config import Config, ServerSettings
from sandkasten.host.checks import CATALOGUE, works
from sandkasten.host.data_dir import make_data_dir
from sandkasten.images.catalog import HOST, Catalog, Image, now
from sandkasten.links.processes import start_egress_as_child
from sandkasten.model import WarmProcess
from sandkasten.model.node import Machine, System
from tests.fakes.nsinit import FakeNsinit
from tests.fakes.runner import Script, ScriptedRun, ScriptedRunner
from tests.ground import in_memory


@attrs.define
class ScriptedTree:
    """A supervisor and what its sandboxes are made of."""

    supervisor: LocalSupervisor
    nsinit: FakeNsinit

    @property
    def scripts(self) -> dict[str, Script]:
        """Script of each command, by the command's text."""
        return self.nsinit.scripts

    @property
    def runs(self) -> list[ScriptedRun]:
        """All runs that have begun."""
        return self.nsinit.runs

    @property
    def runner(self) -> ScriptedRunner:
        """The PID 1 of the only session."""
        (runner,) = self.nsinit.runners.values()
        return runner

    @property
    def run_opened(self) -> trio.Event:
        """Set by the next run that begins; a test clears it by a new one."""
        return self.nsinit.run_opened

    @run_opened.setter
    def run_opened(self, event: trio.Event) -> None:
        self.nsinit.run_opened = event

    @property
    def runners(self) -> Mapping[str, ScriptedRunner]:
        """The PID 1 of each session."""
        return self.nsinit.runners


@asynccontextmanager
async def open_scripted(
    config: Config | None = None,
    *,
    nsinit: FakeNsinit | None = None,
    scripts: Mapping[str, Script] | None = None,
    told: Callable[[System], None] | None = None,
    warm: Mapping[str, WarmProcess] | None = None,
    **changes: Any,  # Any: fields of Config
) -> AsyncIterator[ScriptedTree]:
    """Run the tree. With the `config` and the `nsinit` of a tree before, its sandboxes are adopted."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-", dir=in_memory()) as directory:
        settings: dict[str, Any] = {
            "data_dir": Path(directory) / "data",
            "server": ServerSettings(pool_sandboxes=0),
        } | changes
        config = config or Config(**settings)
        make_data_dir(config.data_dir)
        _make_image(config.data_dir)
        async with trio.open_nursery() as nursery:
            nsinit = nsinit or FakeNsinit(config.data_dir, {}, nursery)
            nsinit.scripts |= scripts or {}
            order = StopOrder(ends_sessions=config.sessions_on_stop != "keep")
            machine = Machine(datetime.now(UTC), [works(name, "as a test says") for name in CATALOGUE])
            start = None if config.preview.listen is None else start_egress_as_child
            async with open_tree(
                config, machine, (), nsinit.start, order, start_egress=start, warm=warm, told=told
            ) as supervisor:
                yield ScriptedTree(supervisor, nsinit)
            nursery.cancel_scope.cancel()


def _make_image(data_dir: Path) -> None:
    """Publish an image with nothing in it, under the name of the one that would be made of the machine."""
    catalog = Catalog(data_dir)
    if all(image.name != HOST for image in catalog.images()):
        with catalog.building(HOST) as directory:
            catalog.publish(directory, Image(name=HOST, kind="rootfs", created_at=now(), source="nothing"))
