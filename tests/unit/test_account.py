"""As whom the daemon runs: what the setting may say, and which ids are refused."""

from __future__ import annotations

import pwd
from contextlib import nullcontext
from dataclasses import replace

import pytest

from nsinit.server.requests import TABLE
from nsinit.wire.launching import Grant, NotGranted, describe_profiles, parse_grant
from nsinit.wire.protocol import (
    FILES_LIMITS,
    Adopt,
    AskDisk,
    AskQuota,
    Build,
    CloseBridge,
    CollectLayers,
    DeleteImage,
    DiscardWorkspace,
    DiskLimits,
    FindLeftovers,
    FindOomKills,
    GrowWorkspace,
    Limits,
    ListWorkspaces,
    MakeRunCgroup,
    MakeWorkspace,
    MountImage,
    OpenBridge,
    OpenNetwork,
    OpenSockets,
    PackLayer,
    PackSession,
    Prepare,
    PublishImage,
    PublishWorkspace,
    RemoveLeftover,
    RemoveRunCgroup,
    SandboxPlan,
    Scan,
    SeccompProfile,
    SeccompRule,
    SetDisk,
    SetFrozen,
    SetLimits,
    StopProcesses,
    SyncWorkspace,
    Teardown,
    TrustAuthority,
    UnpackLayer,
)
from nsinit.wire.validate import InvalidName
from sandkasten.cli.privilege import allowance_of
from sandkasten.config import Config, ConfigError, EgressSettings, IsolationSettings
from sandkasten.host.account import FALLBACK_ID, NAME, ROOT, Account, find_account
from sandkasten.model.network import NetworkMode
from tests.allowance import ALLOWANCE


def test_root_is_said_by_name() -> None:
    """Staying root is a decision of the operator, so it has a word."""
    assert find_account("root") == ROOT
    assert "stays root" in " ".join(Config(user="root").notices())
    assert not any("root" in notice for notice in Config().notices())


def test_without_an_account_a_fixed_id_is_taken() -> None:
    """With one, that."""
    try:
        entry = pwd.getpwnam(NAME)
    except KeyError:
        assert find_account("auto") == Account(FALLBACK_ID, FALLBACK_ID, str(FALLBACK_ID))
    else:
        assert find_account("auto") == Account(entry.pw_uid, entry.pw_gid, NAME)


@pytest.mark.parametrize(
    "user", ["0", "65534", "524288", "600000", "1879048191", "4294967295", "1", "nobody", "no-such"]
)
def test_ids_of_others_are_refused(user: str) -> None:
    """Root by number, nobody, containers and sessions, an account of the system, none at all."""
    with pytest.raises(ConfigError):
        find_account(user)


@pytest.mark.parametrize("user", ["", "Root", "a b", "-1", "1.5", "../x", "x" * 40])
def test_what_is_no_name_is_refused(user: str) -> None:
    """By the configuration, before anything is looked up."""
    with pytest.raises(ValueError, match="user"):
        Config(user=user)


def test_a_grant_holds_the_daemon_to_what_root_said() -> None:
    """Another data directory or cgroup than the granted one is refused; the argument survives the way."""
    grant = Grant("/var/lib/sandkasten", 990, ALLOWANCE, (4, 5), cgroup_parent="system.slice/x.service")
    assert parse_grant([grant.encode()]) == grant
    grant.check("/var/lib/sandkasten", "auto")
    for data_dir, parent in (("/etc", "auto"), ("/var/lib/sandkasten/x", "auto"), ("/var/lib/sandkasten", "other")):
        with pytest.raises(InvalidName):
            grant.check(data_dir, parent)
    with pytest.raises(InvalidName, match="cgroup parent"):
        parse_grant([replace(grant, cgroup_parent="../x").encode()])


PLAN = SandboxPlan("a" * 24, "host", "host", Limits(1 << 30, 256, 100_000), tmp_bytes=64 << 20, shm_bytes=32 << 20)
SMALL = replace(PLAN, disk=DiskLimits(1 << 30, 10_000), open_files=4096)
FILES = SandboxPlan("a" * 24, "files", "files", FILES_LIMITS, "work", workspace_draft=True)
MORE = [
    ("profile", replace(SMALL, seccomp="off")),
    ("image", replace(SMALL, image="other")),
    ("root inside", replace(SMALL, root_inside=True)),
    ("memory_bytes", replace(SMALL, limits=Limits((1 << 30) + 1, 256, 100_000))),
    ("pids", replace(SMALL, limits=Limits(1 << 30, 257, 100_000))),
    ("cpu quota", replace(SMALL, limits=Limits(1 << 30, 256, 100_001))),
    ("cpu quota", replace(SMALL, limits=Limits(1 << 30, 256, 10_001, 10_000))),
    ("disk size", replace(SMALL, disk=DiskLimits((1 << 30) + 1, 10_000))),
    ("disk inodes", replace(SMALL, disk=DiskLimits(1 << 30, 10_001))),
    ("open_files", replace(SMALL, open_files=4097)),
    ("tmp_bytes", replace(SMALL, tmp_bytes=(64 << 20) + 1)),
    ("shm_bytes", replace(SMALL, shm_bytes=(32 << 20) + 1)),
    ("always the same", replace(FILES, limits=Limits(1 << 40, 64, 100_000))),
    ("always the same", replace(FILES, seccomp="off")),
]


@pytest.mark.parametrize(("what", "plan"), MORE)
def test_a_grant_bounds_every_part_of_a_plan(what: str, plan: SandboxPlan) -> None:
    """A plan at the bounds passes; one more of anything does not."""
    for good in (SMALL, FILES):
        ALLOWANCE.check(Build(1, good))
    for request in (Build(1, plan), MountImage(1, plan)):
        with pytest.raises(NotGranted, match=what):
            ALLOWANCE.check(request)


BEYOND = [
    Prepare(1, "a" * 24, Limits(1 << 31, 2, 1000)),
    Prepare(1, "a" * 24, Limits(1 << 30, 2, 1000), DiskLimits(1 << 31, 300)),
    SetLimits(1, "a" * 24, Limits(1 << 30, 1000, 1000)),
    SetDisk(1, "a" * 24, DiskLimits(1 << 31, 300)),
    MakeWorkspace(1, "work", quota=DiskLimits(1 << 31, 300)),
    GrowWorkspace(1, "work", 1 << 31),
    OpenNetwork(1, "a" * 24),
    OpenBridge(1, "a" * 24),
    DeleteImage(1, "image"),
    PackLayer(1, "sha256:" + "0" * 64, 1, 1),
    PublishImage(1, "image", ()),
    TrustAuthority(1, "a" * 24, ""),
]
UNBOUND = {
    *(StopProcesses, Teardown, SetFrozen, Adopt, Scan, AskDisk, FindOomKills, MakeRunCgroup, RemoveRunCgroup),
    *(OpenSockets, CloseBridge, PublishWorkspace, SyncWorkspace, DiscardWorkspace, AskQuota, ListWorkspaces),
    *(FindLeftovers, RemoveLeftover, UnpackLayer, PackSession, CollectLayers),
}
"""Requests that no configuration bounds: about what the daemon has already, or for the store alone."""


def test_each_request_is_bounded_or_needs_no_bound() -> None:
    """A request that is added fails here until its bound, or the lack of one, is decided on."""
    bound = {type(each) for each in BEYOND} | {Build, MountImage}
    assert bound | UNBOUND == set(TABLE)
    assert not bound & UNBOUND


@pytest.mark.parametrize("request_", BEYOND, ids=lambda request: type(request).__name__)
def test_a_grant_bounds_every_request(request_: object) -> None:
    """Blank sandboxes, changes of limits, workspaces, ways out, images and their layers."""
    with pytest.raises(NotGranted):
        ALLOWANCE.check(request_)


@pytest.mark.parametrize("mode", NetworkMode)
def test_a_grant_allows_ways_out_where_the_operator_does(mode: NetworkMode) -> None:
    """The operator's `egress.max_mode` counts."""
    isolation = IsolationSettings(allow_bridge=True)
    granted = allowance_of(Config(isolation=isolation, egress=EgressSettings(max_mode=mode.value)), ())
    assert granted.way_out is (mode is not NetworkMode.NONE)
    assert (granted.bridge is not None) is (mode is NetworkMode.BRIDGE)
    assert parse_grant([Grant("/data", 990, granted).encode()]) == Grant("/data", 990, granted)
    with nullcontext() if granted.way_out else pytest.raises(NotGranted):
        granted.check(OpenNetwork(1, "a" * 24))


def test_a_grant_has_the_rules_of_the_operators_profiles() -> None:
    """A daemon can't give the name of an allowed profile to rules of its own."""
    own = SeccompProfile("own", "errno", (SeccompRule(("read",), "allow"),))
    granted = replace(ALLOWANCE, own_profiles=describe_profiles([own]))
    assert parse_grant([Grant("/data", 990, granted).encode()]) == Grant("/data", 990, granted)
    granted.check_profiles((own,))
    for others in ((), (replace(own, default="allow"),), (own, replace(own, name="more"))):
        with pytest.raises(NotGranted):
            granted.check_profiles(others)


@pytest.mark.parametrize(
    "argument", ['{"data_dir": "/x/..", "gid": 1, "beside": []}', '{"data_dir": "/x", "gid": 0, "beside": []}']
)
def test_a_grant_that_makes_no_sense_is_refused(argument: str) -> None:
    """Then nsinit does not start."""
    with pytest.raises(ValueError):
        parse_grant([argument])


def test_no_grant_means_a_daemon_that_is_root() -> None:
    """As in a program that embeds it."""
    assert parse_grant([]) is None
