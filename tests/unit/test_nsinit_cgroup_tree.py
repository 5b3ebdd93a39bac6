"""The node's cgroup directories: mount tables of real kinds of machines, text in, directories out."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsinit.cgroup import disk_io
from nsinit.cgroup.beside import _places
from nsinit.cgroup.session import SessionCgroup
from nsinit.cgroup.tree import CgroupsUnusable, Located, Tree, bound_pids, choose, claim, locate
from nsinit.kernel.mountinfo import mounts_to_keep, parse_mountinfo, parse_own_cgroups
from nsinit.wire.protocol import CgroupMode, IoLimits
from sandkasten.counters.cgroup import parse_io_stat

ALL_V2 = frozenset({"cpuset", "cpu", "io", "memory", "hugetlb", "pids"})

PURE_V2 = """\
22 27 0:21 / /proc rw,nosuid - proc proc rw
31 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
"""
HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_CO_MOUNTED = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:7 master:3 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
"""
V1_CONTAINER = """\
600 599 0:29 /docker/c0ffee /sys/fs/cgroup/cpu,cpuacct ro,nosuid - cgroup cgroup rw,cpu,cpuacct
601 599 0:32 /docker/c0ffee /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory
602 599 0:36 /docker/c0ffee /sys/fs/cgroup/pids ro,nosuid - cgroup cgroup rw,pids
"""


def _located(mountinfo: str, own: str) -> Located:
    return locate(parse_mountinfo(mountinfo), parse_own_cgroups(own))


def test_pure_v2_under_systemd_is_the_units_directory() -> None:
    """The v2 line's path, below the one mount."""
    located = _located(PURE_V2, "0::/system.slice/sandkasten.service\n")
    assert located.unified == "/sys/fs/cgroup/system.slice/sandkasten.service"
    assert located.unified_mount == "/sys/fs/cgroup"
    assert located.v1 == {}
    assert choose(located, ALL_V2) == "v2"


def test_pure_v2_in_a_cgroup_namespace_is_the_mount_itself() -> None:
    """Inside a container with its own cgroup namespace both paths are the root."""
    assert _located(PURE_V2, "0::/\n").unified == "/sys/fs/cgroup"


def test_hybrid_takes_each_controllers_own_path() -> None:
    """Paths differ between hierarchies; one must never be glued under another's mount."""
    own = "9:name=systemd:/\n8:pids:/\n4:memory:/jobs/17\n2:cpuacct:/\n1:cpu:/\n0::/u\n"
    located = _located(HYBRID, own)
    assert located.v1 == {
        "cpu": "/sys/fs/cgroup/cpu",
        "cpuacct": "/sys/fs/cgroup/cpuacct",
        "memory": "/sys/fs/cgroup/memory/jobs/17",
        "pids": "/sys/fs/cgroup/pids",
    }
    assert located.unified == "/sys/fs/cgroup/unified/u"
    assert choose(located, frozenset({"hugetlb"})) == "hybrid"


def test_v1_with_two_controllers_on_one_mount() -> None:
    """cpu and cpuacct share a directory, and there is no unified one."""
    own = "5:name=systemd:/user.slice\n4:memory:/user.slice\n3:pids:/user.slice\n2:cpu,cpuacct:/user.slice\n"
    located = _located(V1_CO_MOUNTED, own)
    assert located.v1["cpu"] == located.v1["cpuacct"] == "/sys/fs/cgroup/cpu,cpuacct/user.slice"
    assert "name=systemd" not in located.v1
    assert choose(located, frozenset()) == "v1"


def test_a_container_without_cgroup_namespace_sees_its_own_root() -> None:
    """The mount shows /docker/c0ffee only, so that part of the own path is cut."""
    own = "4:memory:/docker/c0ffee\n3:pids:/docker/c0ffee/inner\n2:cpu,cpuacct:/docker/c0ffee\n"
    located = _located(V1_CONTAINER, own)
    assert located.v1["memory"] == "/sys/fs/cgroup/memory"
    assert located.v1["pids"] == "/sys/fs/cgroup/pids/inner"


def test_a_mount_of_another_part_of_the_tree_is_not_used() -> None:
    """A foreign root, or one whose name merely begins alike, gives no directory."""
    own = "4:memory:/other\n3:pids:/docker/c0ffee2\n2:cpu,cpuacct:/docker/c0ffee\n"
    assert set(_located(V1_CONTAINER, own).v1) == {"cpu", "cpuacct"}


def test_a_missing_controller_is_named() -> None:
    """Limits that can't be enforced stop the start, with the controller and what to do."""
    located = _located(HYBRID, "4:memory:/\n2:cpuacct:/\n1:cpu:/\n0::/\n")
    with pytest.raises(CgroupsUnusable, match="no cgroup controller for pids"):
        choose(located, frozenset())


def test_escaped_mount_points_are_decoded() -> None:
    """mountinfo writes a space as \\040."""
    (mount,) = parse_mountinfo("9 1 0:3 / /mnt/a\\040b\\134c rw - cgroup2 cgroup2 rw\n")
    assert mount.point == "/mnt/a b\\c"


def test_each_directory_is_listed_once_memory_first_unified_last() -> None:
    """The order of attach: the dearest first, and the one that clone3 did already last."""
    tree = Tree("hybrid", {"cpu": "/c/x", "cpuacct": "/c/x", "memory": "/m/x", "pids": "/p/x", "unified": "/u/x"})
    assert tree.unique == ("/m/x", "/c/x", "/p/x", "/u/x")
    cgroup = SessionCgroup(tree, "0123456789abcdef")
    assert cgroup.birth_directory == "/u/x/0123456789abcdef"
    assert cgroup.attach_files == tuple(f"/{name}/x/0123456789abcdef/tasks" for name in "mcp")
    assert cgroup.run_cgroup_parent == "/u/x/0123456789abcdef"


def test_v2_needs_no_attach_and_v1_has_no_birth_directory() -> None:
    """clone3 puts the process into a v2 cgroup; in v1 it attaches itself."""
    v2 = SessionCgroup(Tree("v2", dict.fromkeys(("memory", "cpu", "pids", "unified"), "/u/x")), "00")
    assert (v2.attach_files, v2.birth_directory) == ((), "/u/x/00")
    v1 = SessionCgroup(Tree("v1", dict.fromkeys(("memory", "cpu", "pids"), "/m/x")), "00")
    assert (v1.attach_files, v1.birth_directory) == (("/m/x/00/tasks",), None)


def test_groups_are_made_in_the_pids_hierarchy_where_there_is_no_unified_one() -> None:
    """Only there a clone can't place a process."""
    v1 = SessionCgroup(Tree("v1", {"memory": "/m/x", "cpu": "/c/x", "pids": "/p/x"}), "00")
    assert v1.run_cgroup_parent == "/p/x/00"
    assert v1.run_cgroup_directories() == ()


def test_only_mounts_on_in_and_above_needed_paths_are_kept() -> None:
    """The mounts that a session's namespace copies: the holder of each path, its parents, and the mounts inside."""
    table = """\
1 0 8:1 / / rw - ext4 /dev/a rw
2 1 0:2 / /proc rw - proc proc rw
3 1 8:2 / /data rw - xfs /dev/b rw
4 3 8:3 / /data/node/images rw - xfs /dev/c rw
5 3 8:4 / /data/other rw - xfs /dev/d rw
6 1 0:5 / /home rw - nfs server rw
"""
    assert mounts_to_keep(parse_mountinfo(table), ("/data/node", "/proc", "/usr")) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("mode", "written"),
    [
        ("v2", {"io.max": "8:0 rbps=1048576 wiops=50", "io.weight": "default 2000", "io.bfq.weight": "default 1000"}),
        (
            "v1",
            {
                "blkio.throttle.read_bps_device": "8:0 1048576",
                "blkio.throttle.write_iops_device": "8:0 50",
                "blkio.bfq.weight": "1000",
            },
        ),
    ],
)
def test_a_share_of_the_disk_is_written_in_the_words_of_each_version(
    tmp_path: Path, mode: CgroupMode, written: dict[str, str]
) -> None:
    """A maximum of 0 is not written, and a file of another scheduler is left out; without limits no file is touched."""
    directory = tmp_path / "00"
    directory.mkdir()
    for name in written:
        (directory / name).touch()
    cgroup = SessionCgroup(Tree(mode, dict.fromkeys(("unified", "blkio"), str(tmp_path))), "00")
    disk_io.write(cgroup, IoLimits(), "8:0")
    assert {path.read_text() for path in directory.iterdir()} == {""}
    disk_io.write(cgroup, IoLimits(weight=2000, read_bps=1 << 20, write_iops=50), "8:0")
    assert {path.name: path.read_text() for path in directory.iterdir()} == written


def test_limits_of_the_disk_that_nobody_keeps_are_refused() -> None:
    """Without a controller every setting is refused, without a disk the maxima; without settings all is well."""
    bare, full = Tree("v2", {"unified": "/u"}), Tree("v2", {"unified": "/u", "io": "/u"})
    disk_io.check(bare, IoLimits(), "")
    disk_io.check(full, IoLimits(weight=50), "")
    for tree, io, disk in ((bare, IoLimits(weight=50), "8:0"), (full, IoLimits(read_bps=1), "")):
        with pytest.raises(OSError, match="disk"):
            disk_io.check(tree, io, disk)


def test_counters_of_disks_are_summed_without_loop_devices() -> None:
    """The disk below a loop device counts the same bytes again."""
    line = "rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0"
    assert parse_io_stat(f"8:0 {line}\n7:3 {line}\n254:0 {line}\n8:16\n") == [20, 40, 2, 4]
    assert parse_io_stat("") == [0, 0, 0, 0]


def test_all_sessions_together_leave_the_machine_a_tenth_of_its_process_ids(tmp_path: Path) -> None:
    """Of the smaller of both pools, which are the machine's."""
    (tmp_path / "pids.max").write_text("max")
    bound_pids(Tree("hybrid", {"pids": str(tmp_path)}))
    pool = min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max"))
    assert int((tmp_path / "pids.max").read_text()) == pool * 9 // 10


def test_sandboxes_get_their_cgroups_in_another_unit_of_every_hierarchy(tmp_path: Path) -> None:
    """A parent counts from the mount points, wherever nsinit itself is."""
    mounts = {name: str(tmp_path / name) for name in ("cpu", "memory", "pids")}
    own = {name: f"{mount}/system.slice/nsinit.service" for name, mount in mounts.items()}
    located = Located(None, None, own, mounts)
    tree = claim(located, name="sandkasten-x", parent="system.slice/boxes.service")
    assert tree.dirs == {name: f"{mount}/system.slice/boxes.service/sandkasten-x" for name, mount in mounts.items()}
    assert all(Path(each).is_dir() for each in tree.unique)
    assert not any(Path(each).exists() for each in own.values())


@pytest.mark.parametrize(
    ("unified", "place"),
    [
        ("/cg/home/sandkasten-0a1b2c3d/daemon", "/cg/home/sandkasten-0a1b2c3d"),
        ("/cg/system.slice/daemon", "/cg/system.slice/daemon"),
        ("/cg", "/cg"),
    ],
)
def test_a_v2_place_is_beside_the_leaf_of_a_daemon_and_below_any_other(unified: str, place: str) -> None:
    """A cgroup that is called as the leaf is, in a directory of another's, is left alone."""
    assert _places(Located(unified, "/cg", {}, {})) == [place]


def test_each_hierarchy_with_a_limit_has_a_place() -> None:
    """Memory and processors of v1 have one, and v2 has; controllers of one mount share it."""
    v1 = {"memory": "/v1/memory/a", "cpu": "/v1/cpu/b", "pids": "/v1/pids/c"}
    assert _places(Located("/v2/d", "/v2", v1, {})) == ["/v1/memory/a", "/v1/cpu/b", "/v2/d"]
    assert _places(Located(None, None, {"memory": "/v1/all", "cpu": "/v1/all"}, {})) == ["/v1/all"]


def test_a_parent_of_the_operators_is_the_place_where_it_exists(tmp_path: Path) -> None:
    """As for sandboxes: below the mount of each hierarchy, whatever the starter's own cgroup."""
    (tmp_path / "memory/sandboxes.service").mkdir(parents=True)
    mounts = {"memory": f"{tmp_path}/memory", "cpu": f"{tmp_path}/cpu"}
    located = Located(f"{tmp_path}/v2/other", f"{tmp_path}/v2", {}, mounts)
    assert _places(located, "/sandboxes.service") == [f"{tmp_path}/memory/sandboxes.service"]
