"""Look at what there is of sessions and of leftovers, and touch nothing: `python -I -S -B look.py DATA_DIR NODE_ID`.

For whoever wants to know while no nsinit runs, or beside one. Standard input: a JSON object with the ids that the
database has as alive (`recorded`) and the pid of an nsinit that runs (`nsinit`, 0: none). Standard output: one with
`found` and `strays`, as nsinit would answer `Scan` and `Survey`; `homes`, the cgroup directories in which this node's
sessions live, each with the two files of which one takes a process that is to work there; `rivals`, further
directories in which recorded sessions run.

Where an nsinit makes its directory depends on where it was started, so what is there is found by name and mark.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nsinit.cgroup.session import SessionCgroup
from nsinit.cgroup.tree import (
    LEAF,
    OPTIONAL,
    REQUIRED,
    WITHOUT_V2,
    Located,
    Tree,
    group_name,
    home_of,
    mark_of,
    read_mark,
)
from nsinit.scheduler import Wait
from nsinit.server.mounts import MachineMounts
from nsinit.server.sessions import scan
from nsinit.server.start import locate
from nsinit.server.strays import Strays, directories_named, open_blocks
from nsinit.storage.paths import Layout
from nsinit.wire.validate import check_data_dir, check_node_id, is_session_id

R = TypeVar("R")


def main() -> None:
    """Look, and print what was seen."""
    data_dir, node_id = sys.argv[1:3]
    check_data_dir(data_dir)
    check_node_id(node_id)
    request = json.load(sys.stdin)
    json.dump(
        look(Layout(data_dir), group_name(node_id), frozenset(request["recorded"]), request["nsinit"]), sys.stdout
    )


def look(layout: Layout, group: str, recorded: frozenset[str], nsinit: int) -> dict[str, Any]:  # a JSON object
    """Return what is seen; nothing where no nsinit has ever been at work."""
    if not all(map(os.path.isdir, (layout.sessions, layout.run, layout.trash))):
        return {"found": [], "strays": [], "homes": [], "rivals": []}
    located = locate(nsinit or None)
    homes, rivals = choose_homes(located, layout, group, recorded)
    tree = tree_of(located, group, homes)
    strays = Strays(tree, layout, located, group, MachineMounts.open(layout.data_dir), open_blocks())
    try:
        return {
            "found": [asdict(each) for each in scan(tree, layout)[0]],
            "strays": [asdict(each) for each in _finished(strays.find())],
            "homes": [
                [f"{os.path.dirname(each)}/cgroup.procs", f"{each}/{LEAF}/cgroup.procs"] for each in homes.values()
            ],
            "rivals": rivals,
        }
    finally:
        strays.close()


def choose_homes(
    located: Located, layout: Layout, group: str, recorded: frozenset[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the directory in use by mount point: the one with most of the recorded sessions, or else where an nsinit
    is or would be, or else any; and the others in which recorded sessions run."""
    mark, usual = mark_of(layout.data_dir), set(tree_of(located, group, {}).unique)
    homes, rivals = {}, []
    for top in dict.fromkeys((*located.v1_mounts.values(), located.unified_mount)):
        if top is None:
            continue
        marked = [each for each in directories_named(top, group) if read_mark(each) == mark]
        running = {each: recorded.intersection(_running(each)) for each in marked}
        marked.sort(key=lambda each: (-len(running[each]), each not in usual, each))
        if marked:
            homes[top] = marked[0]
            rivals += [each for each in marked[1:] if running[each]]
    return homes, rivals


def tree_of(located: Located, group: str, homes: dict[str, str]) -> Tree:
    """Return the tree of these directories; what is not among them is where this process would have it."""
    own = home_of(located, group)
    unified = None if located.unified_mount is None else homes.get(located.unified_mount, f"{own}/{group}")
    has_v1 = any(located.v1_mounts[name] in homes for name in REQUIRED if name in located.v1_mounts)
    if unified is not None and not has_v1 and (homes or not set(REQUIRED) <= located.v1.keys()):
        return Tree("v2", dict.fromkeys((*REQUIRED, "unified"), unified))
    dirs = {
        name: homes.get(located.v1_mounts[name], f"{located.v1[name]}/{group}")
        for name in (*REQUIRED, *OPTIONAL, *(() if unified else WITHOUT_V2))
        if name in located.v1
    }
    return Tree("v1", dirs) if unified is None else Tree("hybrid", {**dirs, "unified": unified})


def _running(directory: str) -> Iterator[str]:
    """Yield the sessions of which processes are in a cgroup directory."""
    tree = Tree("v2", {"unified": directory, "memory": directory, "pids": directory})
    for name in os.listdir(directory):
        if is_session_id(name) and SessionCgroup(tree, name).processes():
            yield name


def _finished(work: Generator[Wait, bool, R]) -> R:
    """Run a job to its end, without waiting where it would let others have their turn."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: R = end.value
        return result


if __name__ == "__main__":
    main()
