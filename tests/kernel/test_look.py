"""The cgroups of sessions, which may have been made anywhere: found by name and owner, never by a guess."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nsinit.cgroup.tree import Located, owner_of, set_owner
from nsinit.storage.paths import Layout
from nsinit.tools.leftovers import choose_homes
from tests.ground import Ground

GROUP = "sandkasten-12345678"
FIRST, SECOND, THIRD = (letter * 24 for letter in "abc")


@contextmanager
def session_in(home: Path, session_id: str) -> Iterator[None]:
    """Run a process in a session's cgroup."""
    cgroup = home / session_id
    cgroup.mkdir()
    process = subprocess.Popen(["/bin/sleep", "1000"])
    try:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        process.kill()
        process.wait()
        cgroup.rmdir()


@pytest.fixture
def tops(ground: Ground) -> Iterator[dict[str, Path]]:
    """Places in one hierarchy that each have a directory of ours; `copy`'s is of another data directory."""
    places = {name: ground.cgroups[0] / f"look-{name}" / GROUP for name in ("here", "service", "other", "copy")}
    for home in places.values():
        home.mkdir(parents=True)
    yield places
    for home in places.values():
        home.rmdir()
        home.parent.rmdir()


def test_the_home_is_where_recorded_sessions_run_and_other_such_places_are_rivals(
    tops: dict[str, Path], tmp_path: Path, ground: Ground
) -> None:
    """The home is the place where recorded sessions run: not the place of this process, nor of unknown sandboxes, and
    never one with another owner. Without a recorded session it is where one would be made.
    """
    for name, home in tops.items():
        set_owner(str(home), "1:1" if name == "copy" else owner_of(str(tmp_path)))
    top = str(ground.cgroups[0])
    located = Located(None, None, {"memory": os.path.dirname(tops["here"])}, {"memory": top})
    layout, recorded = Layout(str(tmp_path)), frozenset({FIRST, SECOND})
    with ExitStack() as running:
        assert choose_homes(located, layout, GROUP, recorded) == ({top: str(tops["here"])}, [])
        for place, session_id in (("here", THIRD), ("copy", FIRST), ("service", SECOND)):
            running.enter_context(session_in(tops[place], session_id))
        assert choose_homes(located, layout, GROUP, recorded) == ({top: str(tops["service"])}, [])
        running.enter_context(session_in(tops["other"], FIRST))
        homes, rivals = choose_homes(located, layout, GROUP, recorded)
        assert {*homes.values(), *rivals} == {str(tops["service"]), str(tops["other"])}
