"""A service manager that starts nsinit again, while sandboxes run in another unit's cgroup of a pure v2 tree."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import egress
from egress.barrier import MEMORY_BYTES
from nsinit.cgroup.tree import LEAF
from nsinit.wire.protocol import FindLeftovers, LeftoversFound, Ready
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


_BESIDE = f"""
import json, sys
sys.path.append({str(Path(egress.__file__).parents[1])!r})
from egress.barrier import enclose, make_table
from nsinit.cgroup.beside import name_cgroups
paths = name_cgroups("egress")
print(json.dumps([paths, enclose(paths, make_table([], (), ()))]), flush=True)
sys.stdin.read()
"""


def test_a_process_beside_the_daemon_has_limits_and_goes_with_nsinit(units: tuple[Path, Path]) -> None:
    """From the daemon's leaf, which hands no controllers down, it goes beside the leaf and has all of its limits there.
    No session is taken for it, and none for a leftover; the cgroup that it leaves does not outlive nsinit."""
    node_id, (service, _) = secrets.token_hex(8), units
    with data_directory() as data_dir, running(data_dir, node_id, _started_in(service)) as server:
        group = _group(server, service)
        command = [*_started_in(group / LEAF), sys.executable, "-I", "-B", "-c", _BESIDE]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            paths, lacks = json.loads(process.stdout.readline())
            (path,) = map(Path, paths)
            assert (path.parent, lacks) == (group, {})
            assert (_words(path / "memory.max"), _words(path / "cpu.weight")) == ({str(MEMORY_BYTES)}, {"50"})
            answer, _ = server.ask(FindLeftovers)
            assert isinstance(answer, LeftoversFound)
            assert (answer.leftovers, server.scan()) == ((), {})
            process.kill()
        assert path.exists()
    assert not group.exists()
