"""Looking from outside: who holds a file, where sessions' cgroups are, and a database that is read and not touched."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from nsinit.cgroup.tree import Located, Tree
from nsinit.tools.leftovers import tree_of
from sandkasten.host.data_dir import locked
from sandkasten.host.leftovers import CantLook, has_daemon, holder_of, look
from sandkasten.store import sessions as session_store
from sandkasten.store.database import open_database, open_snapshot
from tests.strategies import make_record

ID = "a" * 24
GROUP = "sandkasten-12345678"
MOUNTS = {"memory": "/c/memory", "cpu": "/c/cpu", "pids": "/c/pids"}
HYBRID = Located("/c/unified", "/c/unified", {name: f"{top}/here" for name, top in MOUNTS.items()}, MOUNTS)
PURE = Located(f"/c/here/{GROUP}/daemon", "/c", {}, {})


@pytest.mark.parametrize(
    ("located", "homes", "expected"),
    [
        (PURE, {}, Tree("v2", dict.fromkeys(("memory", "cpu", "pids", "unified"), f"/c/here/{GROUP}"))),
        (PURE, {"/c": "/c/unit/g"}, Tree("v2", dict.fromkeys(("memory", "cpu", "pids", "unified"), "/c/unit/g"))),
        (
            HYBRID,
            {"/c/memory": "/c/memory/unit/g", "/c/unified": "/c/unified/unit/g"},
            Tree(
                "hybrid",
                {
                    "memory": "/c/memory/unit/g",
                    "cpu": f"/c/cpu/here/{GROUP}",
                    "pids": f"/c/pids/here/{GROUP}",
                    "unified": "/c/unified/unit/g",
                },
            ),
        ),
    ],
    ids=["as-nsinit-would", "pure-v2", "hybrid"],
)
def test_the_tree_is_where_sessions_were_found_or_else_where_it_would_be_made(
    located: Located, homes: Mapping[str, str], expected: Tree
) -> None:
    """Each hierarchy for itself: paths need not agree."""
    assert tree_of(located, GROUP, dict(homes)) == expected


def test_who_holds_a_lock_is_known_without_taking_it(tmp_path: Path) -> None:
    """A daemon that starts at that moment is not kept from it."""
    assert not has_daemon(tmp_path)
    with locked(tmp_path):
        assert has_daemon(tmp_path)
    assert not has_daemon(tmp_path)
    with (tmp_path / "other").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert holder_of(tmp_path / "other") == os.getpid()
        assert not has_daemon(tmp_path)


def test_a_directory_in_which_no_fork_server_ever_was_holds_nothing(tmp_path: Path) -> None:
    """The directory is left as it is; a malformed node id is told."""
    assert look(tmp_path, "12345678", ()).found == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CantLook, match="node"):
        look(tmp_path, "../etc", ())


@pytest.mark.parametrize("is_in_use", [True, False])
def test_a_database_that_was_not_closed_is_read_up_to_its_last_commit(tmp_path: Path, is_in_use: bool) -> None:
    """Rows that only the write-ahead log has are read, and no file is made, changed or removed."""
    path = tmp_path / "s.db"
    with closing(open_database(path)) as database:
        session_store.put_session(database, make_record(ID))
        before = {each.name: (each.stat().st_size, each.stat().st_mtime_ns) for each in tmp_path.iterdir()}
        assert before["s.db-wal"][0] > 0
        with open_snapshot(path, is_in_use=is_in_use) as copy:
            assert copy is not None
            assert [each.session.id for each in session_store.live_sessions(copy)] == [ID]
            session_store.next_incarnation(copy)
        assert {each.name: (each.stat().st_size, each.stat().st_mtime_ns) for each in tmp_path.iterdir()} == before


def test_without_a_database_there_is_no_snapshot_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    """A data directory may be younger than its first daemon."""
    with open_snapshot(tmp_path / "none.db", is_in_use=False) as copy:
        assert copy is None
    (tmp_path / "bad.db").write_bytes(b"no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError), open_snapshot(tmp_path / "bad.db", is_in_use=False):
        pass
