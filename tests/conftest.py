"""Fixtures for all tests: probed reasons to skip, and the leak check that fails whatever a test leaves behind.

pytest is made a child subreaper (prctl(2)) on a ground of its own, so that every process a test started, however often
it forked, stays its descendant, and what these made is found there; a leak is then a fact, not a guess. Leftovers are
removed before the test is failed, so that one culprit does not fail its successors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsinit import spawn
from nsinit.storage import shells
from sandkasten.images.catalog import HOST, Catalog
from sandkasten.images.host import ensure_host_image
from tests import leaks
from tests.e2e import seed
from tests.ground import Ground
from tests.kernel.seed import planted

_CAP_SYS_ADMIN = 21
_LONGEST = ("vm", "e2e", "kernel", "contract", "fuzz")
_GROUND = pytest.StashKey[Ground]()


def pytest_configure(config: pytest.Config) -> None:
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise pytest.UsageError("without CONFIG_PROC_CHILDREN in the kernel nobody can say what a test leaves behind")
    config.stash[_GROUND] = Ground.claim()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _GROUND in config.stash:
        config.stash[_GROUND].release()


def _why_no_kernel() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    status = Path("/proc/self/status").read_text().splitlines()
    effective = next(line.split()[1] for line in status if line.startswith("CapEff"))
    if not int(effective, 16) & 1 << _CAP_SYS_ADMIN:
        return "needs CAP_SYS_ADMIN"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies under `kernel/` and `e2e/`; skip that, and what is marked so, with the probed reason if need be.

    Where workers share the files, those that take longest come first, so that none is left to run alone at the end;
    files that are named keep their order.
    """
    if hasattr(config, "workerinput") and not config.option.file_or_dir:
        items.sort(key=_place)
    reason = _why_no_kernel()
    for item in items:
        folder = _folder(item)
        if folder in ("kernel", "e2e"):
            item.add_marker(getattr(pytest.mark, folder))
        if reason is not None and (folder in ("kernel", "e2e") or item.get_closest_marker("e2e")):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the files before all of them are collected: pytest rewrites each file's asserts at its first
    import and keeps the result, which each of the workers would do for all files otherwise (13 s of computing)."""
    gc.disable()  # until the end of the collection, which leaves little garbage
    if not hasattr(session.config, "workerinput"):
        return
    worker = session.config.workerinput
    paths = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
    files = sorted(each for path in paths for each in ([path] if path.is_file() else path.rglob("test_*.py")))
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection itself tells
            importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what stays to the end: it would look at all modules and items again and again."""
    gc.freeze()
    gc.enable()


def _place(item: pytest.Item) -> int:
    folder = _folder(item)
    return _LONGEST.index(folder) if folder in _LONGEST else len(_LONGEST)


def _folder(item: pytest.Item) -> str:
    return Path(item.path).relative_to(Path(__file__).parent).parts[0]


@pytest.fixture
def ground(pytestconfig: pytest.Config) -> Ground:
    """Ground of this process: its own mounts, cgroups and directory."""
    return pytestconfig.stash[_GROUND]


@pytest.fixture(autouse=True)
def leaves_nothing(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail a test that leaves a mount, cgroup, process, descriptor or directory behind."""
    with _leaving_nothing(pytestconfig.stash[_GROUND]):
        yield


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing_in_the_end(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail a file of tests when what they share leaves something behind."""
    with _leaving_nothing(pytestconfig.stash[_GROUND]):
        yield


@contextlib.contextmanager
def _leaving_nothing(ground: Ground) -> Iterator[None]:
    before = leaks.Snapshot.take(ground)
    yield
    left = before.wait_for_difference_to_vanish()
    if left:
        leaks.clean_up(before)
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="session")
def command_seed() -> Iterator[None]:
    """Start each daemon and each verb of this process from a seed (`tests/e2e/seed.py`)."""
    with seed.planted():
        yield


@pytest.fixture(scope="session")
def nsinit_seed() -> Iterator[None]:
    """Start each nsinit of this process from a seed (`tests/kernel/seed.py`)."""
    with planted(spawn.spawn_python) as start, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "spawn_python", start)
        yield


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image store of a data directory after its first session, for `lent_tree`. Making the `host` image takes a
    start 0.3 s of computing, and keeping its shells four flushes of a disk."""
    directory = tmp_path_factory.mktemp("store")
    ensure_host_image(Catalog(directory))
    root_fd = os.open("/", os.O_PATH)
    shells.keep(root_fd, f"{directory}/images/{HOST}/shells")
    os.close(root_fd)
    return directory / "images"
