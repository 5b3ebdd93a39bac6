"""Finds the cgroup hierarchies, decides which one gives which controller, and owns the node's directory in each.

The node's directory holds the cgroups of its sessions. `locate` and `choose` are pure; `claim`, `restore` and `release`
change the tree. In a pure v2 tree a cgroup that hands controllers down may hold no process, so nsinit and the daemon
first move to a leaf of their own.

The node's directory bears the owner xattr, `trusted.sandkasten`, which only root can write: device and inode of the
data directory. The node's id, which names the directory, may have been copied along with a data directory; device and
inode are not. A directory without the attribute, or with another value, is another installation's and is left alone.
Sources: cgroups(7); Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint" and "Delegation";
xattr(7), "Trusted extended attributes".
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from nsinit.kernel.files import write_file
from nsinit.kernel.mountinfo import Mount, is_below, parse_mountinfo, parse_own_cgroups
from nsinit.wire.protocol import CgroupMode

_OWNER = "trusted.sandkasten"
_WITHOUT_OWNER = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOENT, errno.EPERM)
"""No such attribute; none on this file system; no such directory; a container without CAP_SYS_ADMIN."""


def owner_of(data_dir: str) -> str:
    """Return the value of the owner xattr for a data directory."""
    status = os.stat(data_dir)
    return f"{status.st_dev}:{status.st_ino}"


def set_owner(directory: str, owner: str) -> None:
    """Set the owner xattr. Where the kernel keeps no such attributes no directory is ever recognised by one."""
    try:
        os.setxattr(directory, _OWNER, owner.encode())
    except OSError as error:
        if error.errno not in _WITHOUT_OWNER:
            raise


def read_owner(directory: str) -> str:
    """Return the owner xattr of a directory, empty when it has none."""
    try:
        return os.getxattr(directory, _OWNER).decode("ascii", "replace")
    except OSError as error:
        if error.errno not in _WITHOUT_OWNER:
            raise
        return ""


REQUIRED = ("memory", "cpu", "pids")
_VISIBLE = ("memory", "cpu", "cpuacct", "pids")
OPTIONAL = ("cpuacct", "blkio")
"""Controllers that count, and blkio limits, too. v1 keeps them apart; in v2 `cpu.stat` has cpuacct's numbers always."""
WITH_V2 = ("io",)
"""Controllers of a v2 tree that sessions get where they are offered."""
WITHOUT_V2 = ("freezer",)
"""Controllers that v1 keeps apart, and every v2 tree offers, even one without controllers."""


class CgroupsUnusable(Exception):
    """The machine offers no place where limits can be set; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Located:
    """The cgroup of a process in each hierarchy, and the mount points of the hierarchies."""

    unified: str | None
    unified_mount: str | None
    v1: dict[str, str]
    v1_mounts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Tree:
    """The node's directories: `dirs` maps a controller, and `unified`, to one of them."""

    mode: CgroupMode
    dirs: dict[str, str]
    cpuset: str = ""
    """The directory of v1's cpuset, if there is that, which sessions share with nsinit."""

    def visible(self, session_id: str) -> dict[str, str]:
        """Return the session's directories that programs see below `/sys/fs/cgroup`, by their names there; "" is that
        itself."""
        if self.mode == "v2":
            return {"": f"{self.dirs['unified']}/{session_id}"}
        return {name: f"{directory}/{session_id}" for name, directory in self.dirs.items() if name in _VISIBLE}

    @property
    def unique(self) -> tuple[str, ...]:
        """Each directory once, memory first (attaching to that one takes longest), the unified one last."""
        order = sorted(self.dirs, key=lambda name: (name == "unified", name != "memory"))
        return tuple(dict.fromkeys(self.dirs[name] for name in order))


def name_of_node(node_id: str) -> str:
    """Return the name of a node's directory."""
    return f"sandkasten-{node_id[:8]}"


def locate(mounts: tuple[Mount, ...], own: dict[str, str]) -> Located:
    """Return the cgroup of a process in every mounted hierarchy. `own`: its `/proc/<pid>/cgroup`.

    A hierarchy whose mount shows another part of the tree (a container with a foreign root) is left out.
    """
    unified = unified_mount = None
    v1: dict[str, str] = {}
    v1_mounts: dict[str, str] = {}
    for mount in mounts:
        if mount.fstype == "cgroup2" and unified is None and "" in own:
            unified = _own_directory(mount, own[""])
            unified_mount = mount.point if unified else None
        elif mount.fstype == "cgroup":
            for controller in mount.super_options & own.keys():
                directory = _own_directory(mount, own[controller])
                if directory and not controller.startswith("name="):
                    v1.setdefault(controller, directory)
                    v1_mounts.setdefault(controller, mount.point)
    return Located(unified, unified_mount, v1, v1_mounts)


def locate_process(pid: int | None = None) -> Located:
    """Return the cgroups of this process, or of another one. Raises `OSError`."""
    with open("/proc/self/mountinfo", "rb") as mountinfo, open(f"/proc/{pid or 'self'}/cgroup", "rb") as own:
        mounted = parse_mountinfo(os.fsdecode(mountinfo.read()))
        return locate(mounted, parse_own_cgroups(os.fsdecode(own.read())))


def choose(located: Located, unified_controllers: frozenset[str]) -> CgroupMode:
    """Return the mode. Raises `CgroupsUnusable` naming the controllers that no hierarchy offers.

    v2 wins only when it has every controller needed: a session spread over both kinds gains nothing.
    """
    if located.unified is not None and unified_controllers.issuperset(REQUIRED):
        return "v2"
    missing = [name for name in REQUIRED if name not in located.v1]
    if missing:
        raise CgroupsUnusable(
            f"no cgroup controller for {', '.join(missing)}: mount the v1 hierarchy or enable it in the "
            "parent's cgroup.subtree_control (systemd: Delegate=yes)"
        )
    return "hybrid" if located.unified is not None else "v1"


def claim(located: Located, *, name: str, parent: str, beside: tuple[int, ...] = ()) -> Tree:
    """Make the directory `name` in every hierarchy needed and return the tree; `parent` as in `protocol.Start`,
    `beside` as in `Grant`. Raises `CgroupsUnusable`, `OSError`."""
    home = home_of(located, name)
    mode = choose(located, _read_words(f"{home}/cgroup.controllers") if home else frozenset())
    if mode == "v2":
        assert home is not None
        assert located.unified_mount is not None
        directory = _claim_v2(home, located.unified_mount, name=name, parent=parent, beside=beside)
        offered = _read_words(f"{directory}/cgroup.controllers").intersection(WITH_V2)
        return Tree(mode, dict.fromkeys((*REQUIRED, *offered, "unified"), directory))
    dirs = {}
    optional = OPTIONAL if located.unified is not None else (*OPTIONAL, *WITHOUT_V2)
    for controller in (*REQUIRED, *(each for each in optional if each in located.v1)):
        base = located.v1[controller] if parent == "auto" else _below(located.v1_mounts[controller], parent)
        dirs[controller] = _make(base, name)
    if located.unified is not None and located.unified_mount is not None:
        base = located.unified if parent == "auto" else _below(located.unified_mount, parent)
        dirs["unified"] = _make(base, name)
    return Tree(mode, dirs, located.v1.get("cpuset", ""))


def bound_pids(tree: Tree) -> None:
    """Leave a tenth of the machine's process ids and threads to the rest of the machine, however many the sessions may
    have. In a v2 tree the daemon counts among the sessions, since its leaf is beside them. Raises `OSError`.
    """
    pools = []
    for name in ("pid_max", "threads-max"):
        with open(f"/proc/sys/kernel/{name}", "rb") as file:
            pools.append(int(file.read()))
    write_file(f"{tree.dirs['pids']}/pids.max", str(min(pools) * 9 // 10))


def restore(tree: Tree, owner: str) -> None:
    """Make the node's directories again, with their owner, after a cleaner of the machine removed them while no session
    was in them."""
    for directory in tree.unique:
        if not os.path.isdir(directory):
            os.makedirs(directory, exist_ok=True)
            set_owner(directory, owner)
    if tree.mode == "v2":
        _enable(os.path.dirname(tree.dirs["unified"]), os.path.basename(tree.dirs["unified"]))
    bound_pids(tree)


def release(tree: Tree, located: Located) -> None:
    """Remove the node's directories when no session is left in them, and move back out of the v2 leaf."""
    node = tree.dirs["memory"]
    leaf = f"{node}/{LEAF}"
    if tree.mode == "v2" and os.path.isdir(leaf) and not has_sessions(node):
        home = os.path.dirname(node)
        try:
            # cgroup-v2.rst: a cgroup with controllers in subtree_control can hold no process, so that goes first.
            _set_controllers(node, "-")
            _set_controllers(home, "-")
            for pid in _read_words(f"{leaf}/cgroup.procs"):
                write_file(f"{home}/cgroup.procs", pid)
            os.rmdir(leaf)
        except OSError:
            return  # other processes are in the leaf or in the home: the next start works from this state
    for directory in tree.unique:
        try:
            os.rmdir(directory)
        except OSError:
            pass  # sessions live on in it


LEAF = "daemon"
"""In a v2 tree the daemon and nsinit move to a cgroup of this name beside the sessions."""


def home_of(located: Located, name: str) -> str | None:
    """Return the v2 cgroup this process was started in, not the leaf that an earlier nsinit moved it to."""
    return None if located.unified is None else located.unified.removesuffix(f"/{name}/{LEAF}")


def _claim_v2(own: str, mount_point: str, *, name: str, parent: str, beside: tuple[int, ...]) -> str:
    if parent != "auto":
        return _enable(_below(mount_point, parent), name)
    # cgroup.type exists on non-root cgroups only; the root cgroup may hold processes and hand controllers down.
    if not os.path.exists(f"{own}/cgroup.type"):
        return _enable(own, name)
    movable = {str(pid) for pid in (os.getpid(), os.getppid(), *beside)}
    if _read_words(f"{own}/cgroup.procs") <= movable and (directory := _move_to_leaf(own, name)):
        return directory
    if _read_words(f"{mount_point}/cgroup.subtree_control").issuperset(REQUIRED):
        return _enable(mount_point, name)
    raise CgroupsUnusable(
        "other processes share the daemon's cgroup, so it can't hand controllers down: start it in a unit or scope of "
        "its own (systemd-run --scope -p Delegate=yes ...), or name a delegated directory as the cgroup parent"
    )


def _move_to_leaf(own: str, name: str) -> str | None:
    """Move nsinit and the daemon out of the way and hand controllers down; None, and nothing moved, if that fails."""
    leaf = f"{own}/{name}/{LEAF}"
    os.makedirs(leaf, exist_ok=True)
    moved: list[str] = []
    try:
        for pid in _read_words(f"{own}/cgroup.procs"):
            write_file(f"{leaf}/cgroup.procs", pid)
            moved.append(pid)
        return _enable(own, name)
    except OSError:
        for pid in moved:
            write_file(f"{own}/cgroup.procs", pid)
        os.rmdir(leaf)
        os.rmdir(os.path.dirname(leaf))
        return None


def _enable(base: str, name: str) -> str:
    """Make a directory to which `base` hands controllers down, and which hands them down to sessions."""
    directory = _make(base, name)
    _set_controllers(base, "+")
    _set_controllers(directory, "+")
    return directory


def _set_controllers(directory: str, sign: str) -> None:
    path = f"{directory}/cgroup.subtree_control"
    enabled = _read_words(path)
    wanted = (*REQUIRED, *_read_words(f"{directory}/cgroup.controllers").intersection(WITH_V2))
    change = [controller for controller in wanted if (controller in enabled) is (sign == "-")]
    if change:
        write_file(path, " ".join(sign + controller for controller in change))


def _make(base: str, name: str) -> str:
    directory = f"{base.rstrip('/')}/{name}"
    os.makedirs(directory, exist_ok=True)
    return directory


def has_sessions(directory: str) -> bool:
    """Whether a node's directory holds a cgroup other than the daemon's: a session's, or one of a process beside the
    daemon, which may outlive it."""
    return any(entry.is_dir() and entry.name != LEAF for entry in os.scandir(directory))


BESIDE = "sandkasten-beside-"
"""Beginning of the names of cgroups of processes beside the daemon (`beside.py`)."""


def is_ours(name: str) -> bool:
    """Whether a cgroup of that name in a node's directory is the daemon's, or one of a process beside it."""
    return name == LEAF or name.startswith(BESIDE)


def _below(mount_point: str, parent: str) -> str:
    return f"{mount_point.rstrip('/')}/{parent.strip('/')}".rstrip("/")


def _own_directory(mount: Mount, path: str) -> str | None:
    """Return where the cgroup `path` is seen below `mount.point`; None if the mount doesn't show it."""
    if not is_below(path, mount.root):
        return None
    inner = path if mount.root == "/" else path[len(mount.root) :]
    return f"{mount.point.rstrip('/')}/{inner.strip('/')}".rstrip("/")


def _read_words(path: str) -> frozenset[str]:
    with open(path, "rb") as file:
        return frozenset(file.read().decode().split())
