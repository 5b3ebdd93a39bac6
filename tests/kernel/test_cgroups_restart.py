"""A service manager that starts nsinit again, while sandboxes run in another unit's cgroup of a pure v2 tree."""

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
def units() -> Iterator[tuple[Path, Path]]:
    """The cgroups of two services: that of nsinit's, and a delegated one that has no process of its own."""
    controllers = _ROOT / "cgroup.subtree_control"
    if not controllers.exists() or not _words(controllers) >= _CONTROLLERS:
        pytest.skip("needs a pure cgroup v2 tree whose root hands controllers down")
    name = f"sandkasten-unit-{secrets.token_hex(4)}"
    service, sandboxes = _ROOT / name, _ROOT / f"{name}-sandboxes"
    service.mkdir()
    sandboxes.mkdir()
    yield service, sandboxes
    wait_until(lambda: not _words(service / "cgroup.procs"), "nsinit's helpers stay")
    service.rmdir()
    sandboxes.rmdir()


def _started_in(unit: Path) -> tuple[str, ...]:
    """Return a wrapper that does as the manager does: into the unit's own cgroup, then execute."""
    return ("/bin/sh", "-c", f'echo $$ >{unit}/cgroup.procs && exec "$@"', "sh")


def _group(server: Nsinit, unit: Path) -> Path:
    assert isinstance(server.ready, Ready), server.ready
    group = Path(server.ready.cgroup_dirs["memory"])
    assert group.parent == unit
    return group


def test_nsinit_starts_again_while_its_sandboxes_run(units: tuple[Path, Path]) -> None:
    """The service's cgroup hands no controllers down, so that the second start is possible, and finds the sandbox."""
    node_id, (service, sandboxes) = secrets.token_hex(8), units
    with data_directory() as data_dir:
        with running(data_dir, node_id, _started_in(service), cgroup_parent=sandboxes.name) as first:
            group = _group(first, sandboxes)
            sandbox = first.build(host_plan())
            first.kill()
        assert _words(service / "cgroup.subtree_control") == _words(sandboxes / "cgroup.procs") == set()
        assert _words(sandboxes / "cgroup.subtree_control") >= _CONTROLLERS
        with running(data_dir, node_id, _started_in(service), cgroup_parent=sandboxes.name) as second:
            assert _group(second, sandboxes) == group
            assert sandbox.session_id in second.scan()
        assert not os.path.exists(group)
