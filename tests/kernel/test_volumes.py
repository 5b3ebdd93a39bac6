"""Workspaces with a quota, from the inside and the outside: what can be filled, who shares it, what outlives what."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.steps import StepFailed
from nsinit.storage.ext4_image import find_tool, make_image
from nsinit.storage.paths import Layout
from nsinit.storage.volumes import Volumes
from nsinit.storage.workspaces import Workspaces
from nsinit.wire.protocol import (
    DiscardWorkspace,
    DiskLimits,
    Failed,
    GrowWorkspace,
    ListWorkspaces,
    MakeWorkspace,
    Ok,
    PublishWorkspace,
    SyncWorkspace,
)
from tests.kernel.harness import ROOMY, Nsinit, Sandbox, data_directory, host_plan, new_node_id, running, wait_until

MIB = 1 << 20
SMALL = DiskLimits(size_bytes=32 * MIB, inodes=400)
ID = "ws"

FILL = """
import errno, os
fd = os.open("/workspace/big", os.O_CREAT | os.O_WRONLY)
total = 0
try:
    while True:
        total += os.write(fd, bytes(1 << 20))
except OSError as error:
    print(errno.errorcode[error.errno], 16 << 20 < total < 32 << 20)
os.unlink("/workspace/big")
"""
FILL_FILES = """
import errno, os
try:
    for number in range(2000):
        os.close(os.open(f"/workspace/{number}", os.O_CREAT))
except OSError as error:
    print(errno.errorcode[error.errno], 350 < number < 500)
for name in os.listdir("/workspace"):
    if name.isdigit():
        os.unlink(f"/workspace/{name}")
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Nsinit]:
    """One nsinit, with a volume."""
    with data_directory() as data_dir, running(data_dir) as nsinit:
        assert isinstance(make(nsinit), Ok)
        yield nsinit


def make(nsinit: Nsinit, workspace_id: str = ID, *, quota: DiskLimits | None = SMALL, draft: bool = False) -> object:
    return nsinit.ask(MakeWorkspace, workspace_id=workspace_id, draft=draft, quota=quota)[0]


def enter(nsinit: Nsinit, workspace_id: str = ID) -> Sandbox:
    return nsinit.build(replace(host_plan(), limits=ROOMY, workspace_id=workspace_id))


def devices(nsinit: Nsinit) -> list[str]:
    """Return the files behind loop devices that are a volume's image."""
    found = []
    for name in os.listdir("/sys/block"):
        try:
            with open(f"/sys/block/{name}/loop/backing_file") as file:
                path = file.read().strip()
        except OSError:
            continue
        if f"{nsinit.data_dir}/volume" in path or f"{nsinit.data_dir}/trash" in path:
            found.append(path)
    return found


def test_what_is_over_a_quota_is_no_space_left(server: Nsinit) -> None:
    """Bytes and files over the quota are no space left; there is room again after a removal; no path of the machine
    shows.
    """
    sandbox = enter(server)
    assert sandbox.python(FILL) == "ENOSPC True"
    assert sandbox.python(FILL_FILES) == "ENOSPC True"
    assert sandbox.python(FILL) == "ENOSPC True"
    assert sandbox.run("ls -A /workspace; stat -c '%U %a' /workspace").out == "sandbox 755\n"
    shown = sandbox.run("grep ' /workspace ' /proc/self/mountinfo").out
    assert ("nosuid" in shown, "nodev" in shown, str(server.data_dir) in shown) == (True, True, False)


def test_those_who_share_a_volume_see_one_file_system(server: Nsinit) -> None:
    """One loop device for all of them, however many at once; it goes with the last."""
    sandboxes = [enter(server) for _ in range(3)]
    assert len(devices(server)) == 1
    for number, sandbox in enumerate(sandboxes):
        assert sandbox.run(f"echo {number} >> /workspace/log").code == 0
    assert {each.run("cat /workspace/log").out for each in sandboxes} == {"0\n1\n2\n"}
    for sandbox in sandboxes[1:]:
        sandbox.teardown()
    assert sandboxes[0].run("cat /workspace/log; rm /workspace/log").out == "0\n1\n2\n"
    sandboxes[0].teardown()
    wait_until(lambda: devices(server) == [], "the device goes with the last mount")


def test_what_was_written_is_there_for_the_next(server: Nsinit) -> None:
    """All that a killed session wrote is left for the next, and so is what a session was told is on the disk."""
    sandbox = enter(server)
    assert sandbox.run("head -c 3000000 /dev/zero > /workspace/data; sync; echo x > /workspace/late").code == 0
    sandbox.teardown()
    assert isinstance(server.ask(SyncWorkspace, workspace_id=ID)[0], Ok)
    again = enter(server)
    assert again.run("stat -c %s /workspace/data; cat /workspace/late; rm /workspace/*").out == "3000000\nx\n"


def test_a_volume_outlives_nsinit_and_is_shared_across_its_end() -> None:
    """A session that lives on has the volume mounted; a session that the next nsinit builds gets the same file system,
    not a second mount of the image.
    """
    node_id = new_node_id()
    with data_directory() as data_dir, running(data_dir, node_id) as first:
        assert isinstance(make(first), Ok)
        old = enter(first)
        assert old.run("echo one > /workspace/f").code == 0
        first.kill()
        with running(data_dir, node_id) as second:
            new = enter(second)
            assert len(devices(second)) == 1
            assert new.run("echo two >> /workspace/f; cat /workspace/f").out == "one\ntwo\n"
            assert old.run("cat /workspace/f").out == "one\ntwo\n"
            second.teardown(old.session_id)
            second.teardown(new.session_id)
            wait_until(lambda: devices(second) == [], "the device goes")


def test_a_volume_grows_while_nobody_has_it_and_never_shrinks(server: Nsinit) -> None:
    """Files stay, and there is room for more. While a sandbox has the volume, and for a smaller size, it is refused."""
    assert isinstance(make(server, "grows"), Ok)
    sandbox = enter(server, "grows")
    before = int(sandbox.run("stat -f -c %b /workspace").out)
    assert sandbox.run("echo kept > /workspace/f").code == 0
    assert grow(server, 320) == errno.EBUSY
    sandbox.teardown()
    assert grow(server, 320) == 0
    again = enter(server, "grows")
    assert int(again.run("stat -f -c %b /workspace").out) > 8 * before
    assert again.run("cat /workspace/f; head -c 100M /dev/zero > /workspace/g").out == "kept\n"
    again.teardown()
    assert grow(server, 64) == errno.EINVAL
    assert sorted(os.listdir(server.data_dir / "volumes/grows")) == ["image"]
    assert isinstance(server.ask(DiscardWorkspace, workspace_id="grows")[0], Ok)
    wait_until(lambda: devices(server) == [], "nothing of it is left")


def grow(nsinit: Nsinit, size_mb: int) -> int:
    """Return the errno that growing the volume was refused with."""
    answer = nsinit.ask(GrowWorkspace, workspace_id="grows", size_bytes=size_mb * MIB)[0]
    return answer.errno if isinstance(answer, Failed) else 0


def test_where_sessions_have_other_disks_there_are_volumes_all_the_same() -> None:
    """Whether images can be mounted is tried by itself."""
    with data_directory() as data_dir, running(data_dir, disk="tmpfs") as nsinit:
        assert isinstance(make(nsinit), Ok)
        assert enter(nsinit).python(FILL) == "ENOSPC True"


def test_without_a_mechanism_nothing_is_made(tmp_path: Path) -> None:
    """The request is refused with the reason, and no workspace is made without a quota instead."""
    layout = Layout(str(tmp_path))
    layout.make()
    volumes = Volumes(layout, -1)
    volumes.open("loop", {})
    request = MakeWorkspace(1, ID, quota=SMALL)
    with pytest.raises(StepFailed, match="can't be seen") as refused:
        list(Workspaces(layout, volumes).make(request))
    assert refused.value.errno == errno.EOPNOTSUPP
    assert os.listdir(layout.workspaces) + os.listdir(layout.volumes) + os.listdir(layout.volume_drafts) == []


def test_a_name_is_a_directory_or_a_volume_and_never_both(server: Nsinit) -> None:
    """Neither a directory nor a volume is made over the other; a draft for a volume has the volume's size; both are
    listed and discarded alike.
    """
    assert isinstance(make(server, "plain", quota=None), Ok)
    refused = make(server, "plain")
    assert isinstance(refused, Failed)
    assert refused.errno == errno.EXDEV
    assert isinstance(make(server, ID, quota=None), Ok)
    assert not os.path.exists(server.data_dir / "workspaces" / ID)
    assert isinstance(make(server, ID, quota=None, draft=True), Ok)
    sandbox = enter(server)
    assert sandbox.run("echo old > /workspace/f").code == 0
    sandbox.teardown()
    assert isinstance(server.ask(PublishWorkspace, workspace_id=ID, replace=True)[0], Ok)
    sandbox = enter(server)
    assert sandbox.run("ls -A /workspace").out == ""
    assert sandbox.python(FILL) == "ENOSPC True"
    assert server.ask(ListWorkspaces)[0].names == ("plain", ID)
    for name in ("plain", "none"):
        assert isinstance(server.ask(DiscardWorkspace, workspace_id=name)[0], Ok)
    assert server.ask(ListWorkspaces)[0].names == (ID,)


def test_a_copy_that_can_not_be_deleted_is_told_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A copy takes room on the host. A volume without one, and a file that is no volume, are not mentioned."""
    layout = Layout(str(tmp_path))
    for name in ("with", "without", "stuck"):
        Path(layout.volumes, name).mkdir(parents=True)
    Path(layout.volumes, "file").touch()
    Path(layout.volumes, "with/copy").touch()
    Path(layout.volumes, "stuck/copy").mkdir()
    Volumes(layout, -1).discard_copies()
    assert not Path(layout.volumes, "with/copy").exists()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"{layout.volumes}/stuck/copy" in lines[0]


def test_a_new_volume_writes_little_however_large_it_may_become(tmp_path: Path) -> None:
    """Most of it is its journal, which mke2fs would write with 64 MiB for 10 GiB."""
    make_image(find_tool("mke2fs"), DiskLimits(10 << 30, 1000), str(tmp_path / "image"), has_journal=True)
    assert (tmp_path / "image").stat().st_blocks * 512 < 20 * MIB
