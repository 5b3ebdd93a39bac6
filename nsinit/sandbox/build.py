"""THE order in which a sandbox is built, and who does each part.

The cgroup comes from a process that can make nothing else. PID 1 is a fork of the forker, and every page that PID 1
writes is copied for it alone; so the long lists are the builder's, a process that has done it all before. The builder
joins the mount, network and host name namespaces of PID 1, works in them as real root, and has left them when PID 1
gives its power away and the runner starts.

There is no "warn and continue": a step that fails ends the build, named with its path and errno.
Sources: clone(2), setns(2), pivot_root(2), user_namespaces(7), pid_namespaces(7).
"""

from __future__ import annotations

from collections.abc import Callable

from nsinit.cgroup import limits
from nsinit.cgroup.session import BUILDING_SHARE, SessionCgroup
from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.sandbox import builder_steps, init_steps, network
from nsinit.sandbox.builder_steps import SandboxBuild
from nsinit.wire.protocol import Limits, SandboxPlan

CGROUP_STEPS: tuple[tuple[str, Callable[[SessionCgroup, Limits], object]], ...] = (
    ("cgroup directories", lambda cgroup, limits: cgroup.make()),
    ("cgroup share", lambda cgroup, limits: cgroup.set_share(BUILDING_SHARE)),
    ("cgroup limits", limits.first),
)
"""By the cgroup maker, before there is a process to limit."""

BIRTH_STEPS: tuple[tuple[str, Callable[[init_steps.Init], object]], ...] = (
    ("parent death signal", init_steps.arm_parent_death),
    ("name", init_steps.take_name),
    ("close inherited", init_steps.close_descriptors),
    ("setsid", init_steps.start_session),
    ("cgroup attach", init_steps.attach_cgroups),
    ("cgroup namespace", init_steps.unshare_cgroups),
    ("mount proc", init_steps.mount_proc),
    ("oom score", init_steps.set_oom_score),
    ("rlimits", init_steps.set_limits),
)
"""By PID 1, which then rehearses what it will serve (`Runner.rehearse`) and waits for the builder's word."""

JOIN_STEPS: tuple[tuple[str, Callable[[SandboxBuild], object]], ...] = (
    ("join namespaces", builder_steps.join_namespaces),
)
"""By the builder, first of all."""

BLANK_STEPS: tuple[tuple[str, Callable[[SandboxBuild], object]], ...] = (
    *JOIN_STEPS,
    ("hostname", lambda build: syscalls.sethostname(build.hostname)),
    ("private mounts", lambda build: syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)),
    ("loopback", lambda build: network.loopback_up()),
    ("disk", builder_steps.make_disk),
    ("stage dev", builder_steps.stage_dev),
    ("await proc", builder_steps.await_proc),
    ("network settings", lambda build: network.write_settings(builder_steps.staged_proc(build))),
    ("protect proc", builder_steps.protect_proc),
)
"""By the builder, at the same time as PID 1's steps. No image is needed or touched. A blank sandbox of the pool waits
here."""

IMAGE_STEPS: tuple[tuple[str, Callable[[SandboxBuild, SandboxPlan], object]], ...] = (
    ("disk limits", builder_steps.fit_disk),
    ("overlay root", builder_steps.mount_root),
    ("overlay usr", builder_steps.mount_usr),
    ("proc", builder_steps.place_proc),
    ("sys", builder_steps.mount_sys),
    ("dev", builder_steps.place_dev),
    ("tmp", builder_steps.mount_tmp),
    ("run", builder_steps.mount_run),
    ("shells", builder_steps.mount_shells),
    ("user directories", builder_steps.make_user_directories),
    ("etc", builder_steps.write_etc),
)
"""By the builder. These steps depend on no field of the plan outside `SandboxPlan.image_key`. A sandbox of the pool
with an image waits here."""

LAST_STEPS: tuple[tuple[str, Callable[[SandboxBuild, SandboxPlan], object]], ...] = (
    ("image root", builder_steps.find_root),
    ("views", builder_steps.mount_views),
    ("workspace", builder_steps.mount_workspace),
    ("read-only root", builder_steps.make_read_only),
    ("pivot root", builder_steps.pivot),
)
"""By the builder, which afterwards leaves the namespaces, closes its descriptors of them, and lets PID 1 go on."""

BARE_STEPS: tuple[tuple[str, Callable[[SandboxBuild], object]], ...] = tuple(
    step for step in BLANK_STEPS if step[0] not in ("network settings", "loopback", "disk")
)
"""By the builder, for a sandbox without programs, which has no use for a network or a disk of its own."""

FILES_STEPS: tuple[tuple[str, Callable[[SandboxBuild, SandboxPlan], object]], ...] = (
    ("empty root", builder_steps.mount_empty_root),
    ("proc", builder_steps.place_proc),
    ("dev", builder_steps.place_dev),
    ("run", builder_steps.mount_run),
    ("workspace", builder_steps.mount_workspace),
    ("read-only root", builder_steps.close_root),
    ("pivot root", builder_steps.pivot),
)
"""By the builder, instead of an image: a workspace, and the mounts that PID 1 itself needs."""

POWER_STEPS: tuple[tuple[str, Callable[[init_steps.Init], object]], ...] = (
    ("working directory", init_steps.enter_root),
    ("close descriptors", init_steps.close_descriptors),
    ("shells", init_steps.keep_shells),
    ("standard streams", init_steps.silence_standard_streams),
    ("oom file", init_steps.keep_oom_file),
    ("socket counters", init_steps.keep_socket_counters),
    ("diag socket", init_steps.keep_diag_socket),
    ("open files", init_steps.limit_open_files),
    ("user namespace", init_steps.join_user_namespace),
    ("bounding set", init_steps.drop_bounding_set),
    ("runner id", init_steps.become_runner),
    ("capabilities", init_steps.keep_runner_capabilities),
    ("keyring", init_steps.leave_keyring),
    ("not dumpable", init_steps.forbid_dumps),
    ("import lockdown", init_steps.lock_imports),
    ("merge pages", init_steps.offer_pages),
    ("landlock", init_steps.keep_inside),
    ("system call filter", init_steps.filter_system_calls),
)
"""By PID 1: from joining the user namespace on, none of the above can be done or undone; then the runner takes over.

The system call filter is last, with Landlock just before: PID 1 lives under both, and no step above must need a hole in
them.
"""
