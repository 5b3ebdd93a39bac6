"""A service manager that starts nsinit again in a delegated cgroup of a pure v2 tree, while sandboxes run below it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsinit.wire.protocol import Ready
from tests.kernel.harness import Nsinit, data_directory, host_plan, running, wait_until

pytestmark = pytest.mark.cgroup_v2

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = {"cpu", "memory", "pids"}


def _words(path: Path) -> set[str]:
    return set(path.read_text().split())


@pytest.fixture
def unit() -> Iterator[Path]:
    """A cgroup as a service manager delegates one: empty, its subgroup for the service's processes."""
    controllers = _ROOT / "cgroup.subtree_control"
    if not controllers.exists() or not _words(controllers) >= _CONTROLLERS:
        pytest.skip("needs a pure cgroup v2 tree whose root hands controllers down")
    unit = _ROOT / f"sandkasten-unit-{secrets.token_hex(4)}"
    (unit / "keeper").mkdir(parents=True)
    yield unit
    wait_until(lambda: not _words(unit / "keeper/cgroup.procs"), "nsinit's helpers stay")
    (unit / "keeper").rmdir()
    unit.rmdir()


def _started_in(unit: Path) -> tuple[str, ...]:
    """Return a wrapper that does as the manager does: into the subgroup, then execute."""
    return ("/bin/sh", "-c", f'echo $$ >{unit}/keeper/cgroup.procs && exec "$@"', "sh")


def _group(server: Nsinit, unit: Path) -> Path:
    assert isinstance(server.ready, Ready), server.ready
    group = Path(server.ready.cgroup_dirs["memory"])
    assert group.parent == unit
    return group


def test_nsinit_starts_again_where_its_sandboxes_run(unit: Path) -> None:
    """The unit's own cgroup stays free of processes, so that the second start is possible, and finds the sandbox."""
    node_id = secrets.token_hex(8)
    with data_directory() as data_dir:
        with running(data_dir, node_id, _started_in(unit)) as first:
            group = _group(first, unit)
            sandbox = first.build(host_plan())
            first.kill()
        assert _words(unit / "cgroup.procs") == set()
        assert _words(unit / "cgroup.subtree_control") >= _CONTROLLERS
        with running(data_dir, node_id, _started_in(unit)) as second:
            assert _group(second, unit) == group
            assert sandbox.session_id in second.scan()
        assert not os.path.exists(group)
