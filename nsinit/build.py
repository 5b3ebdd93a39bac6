"""THE order in which a sandbox is built, and who does each part.

The cgroup comes from a process that can make nothing else. PID 1 is a fork of nsinit, and every page it touches is
copied for it alone; the builder is a process that has done it all before, so the long lists are its. It joins the
mount, network and host name namespaces of PID 1, works in them as real root, and has left them when PID 1 gives its
power away and the runner starts.
There is no "warn and continue" here: a step that fails ends the build, named with its path and errno.
Sources: clone(2), setns(2), pivot_root(2), user_namespaces(7), pid_namespaces(7).
"""

from __future__ import annotations

from collections.abc import Callable

from nsinit import constants as k
from nsinit import furnish, limits, network, pid1, syscalls
from nsinit.cgroups import BUILDING_SHARE, SessionCgroup
from nsinit.furnish import Box
from nsinit.protocol import Limits, SandboxPlan

CGROUP_STEPS: tuple[tuple[str, Callable[[SessionCgroup, Limits], object]], ...] = (
    ("cgroup directories", lambda cgroup, limits: cgroup.make()),
    ("cgroup share", lambda cgroup, limits: cgroup.set_share(BUILDING_SHARE)),
    ("cgroup limits", limits.first),
)
"""The cgroup maker, before there is a process to limit."""

BIRTH_STEPS: tuple[tuple[str, Callable[[pid1.Init], object]], ...] = (
    ("parent death signal", pid1.arm_parent_death),
    ("name", pid1.take_name),
    ("close inherited", pid1.close_descriptors),
    ("setsid", pid1.start_session),
    ("cgroup attach", pid1.attach_cgroups),
    ("cgroup namespace", pid1.unshare_cgroups),
    ("mount proc", pid1.mount_proc),
    ("oom score", pid1.set_oom_score),
    ("rlimits", pid1.set_limits),
)
"""PID 1; then it rehearses what it will serve (`runner.server.rehearsal`), and waits for the builder's word."""

JOIN_STEPS: tuple[tuple[str, Callable[[Box], object]], ...] = (("join namespaces", furnish.join_namespaces),)
"""The builder, first of all."""

BLANK_STEPS: tuple[tuple[str, Callable[[Box], object]], ...] = (
    *JOIN_STEPS,
    ("hostname", lambda box: syscalls.sethostname(box.hostname)),
    ("private mounts", lambda box: syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)),
    ("network settings", lambda box: network.write_settings(box.base)),
    ("loopback", lambda box: network.loopback_up()),
    ("disk", furnish.make_disk),
    ("stage dev", furnish.stage_dev),
    ("protect proc", furnish.protect_proc),
)
"""The builder, at the same time; nothing of an image is needed or touched. A prepared vessel waits here."""

IMAGE_STEPS: tuple[tuple[str, Callable[[Box, SandboxPlan], object]], ...] = (
    ("disk limits", furnish.fit_disk),
    ("overlay root", furnish.mount_root),
    ("overlay usr", furnish.mount_usr),
    ("proc", furnish.place_proc),
    ("dev", furnish.place_dev),
    ("tmp", furnish.mount_tmp),
    ("run", furnish.mount_run),
    ("user directories", furnish.make_user_directories),
    ("etc", furnish.write_etc),
)
"""The builder. `SandboxPlan.furnishing` is all of the plan that these look at. A furnished vessel waits here."""

LAST_STEPS: tuple[tuple[str, Callable[[Box, SandboxPlan], object]], ...] = (
    ("furnished root", furnish.find_root),
    ("workspace", furnish.mount_workspace),
    ("read-only root", furnish.make_read_only),
    ("pivot root", furnish.pivot),
)
"""The builder. Afterwards it leaves the namespaces, closes what it held of them, and lets PID 1 go on."""

BARE_STEPS: tuple[tuple[str, Callable[[Box], object]], ...] = tuple(
    step for step in BLANK_STEPS if step[0] not in ("network settings", "loopback", "disk")
)
"""The builder, for a sandbox without programs: nothing in it has a use for a network or a disk of its own."""

FILES_STEPS: tuple[tuple[str, Callable[[Box, SandboxPlan], object]], ...] = (
    ("empty root", furnish.mount_empty_root),
    ("proc", furnish.place_proc),
    ("dev", furnish.place_dev),
    ("run", furnish.mount_run),
    ("workspace", furnish.mount_workspace),
    ("read-only root", furnish.close_root),
    ("pivot root", furnish.pivot),
)
"""The builder, instead of an image: a workspace, and what PID 1 itself needs."""

POWER_STEPS: tuple[tuple[str, Callable[[pid1.Init], object]], ...] = (
    ("working directory", pid1.enter_root),
    ("close descriptors", pid1.close_descriptors),
    ("standard streams", pid1.silence_standard_streams),
    ("oom file", pid1.keep_oom_file),
    ("open files", pid1.limit_open_files),
    ("user namespace", pid1.join_user_namespace),
    ("bounding set", pid1.drop_bounding_set),
    ("runner id", pid1.become_runner),
    ("capabilities", pid1.keep_runner_capabilities),
    ("keyring", pid1.leave_keyring),
    ("not dumpable", pid1.forbid_dumps),
    ("import lockdown", pid1.lock_imports),
    ("landlock", pid1.keep_inside),
    ("system call filter", pid1.filter_system_calls),
)
"""PID 1: from joining the user namespace on, nothing of the above can be done or undone; then the runner takes over.

The system call filter is last, with Landlock just before: PID 1 lives under both, and no step above must need a hole in
them."""
