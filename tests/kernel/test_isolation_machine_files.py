"""The machine's own `/usr` in a host image: what a person of the machine owns there is not the sandbox user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsinit.kernel.slots import FIRST_BASE, SANDBOX_ID, SYSTEM_IDS, make_id_map
from tests.kernel.harness import Nsinit, data_directory, host_plan, running

PERSON = SANDBOX_ID
"""A uid that people of this machine have, and the sandbox user as well."""


@pytest.fixture
def server() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir) as nsinit:
        yield nsinit


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory below the machine's `/usr` that everyone may list."""
    path = Path(tempfile.mkdtemp(prefix="sandkasten-test-", dir="/usr/local"))
    try:
        path.chmod(0o755)
        yield path
    finally:
        shutil.rmtree(path)


def _make(path: Path, owner: int, mode: int) -> Path:
    path.write_text(f"{path.name}\n")
    os.chown(path, owner, owner)
    path.chmod(mode)
    return path


def test_a_private_file_of_uid_1000_can_not_be_read_inside(server: Nsinit, directory: Path) -> None:
    """The uid is the sandbox user's number, but the file is nobody's inside, so mode 0600 keeps it shut."""
    private, public = _make(directory / "private", PERSON, 0o600), _make(directory / "public", PERSON, 0o644)
    sandbox = server.build(host_plan())
    assert sandbox.run(f"stat -c %u:%g {private} {public}").out.split() == ["65534:65534"] * 2
    assert "Permission denied" in sandbox.run(f"cat {private}").err
    assert sandbox.run(f"cat {public}").out == "public\n"
    sandbox.teardown()


@pytest.mark.parametrize("owner", [SYSTEM_IDS, SANDBOX_ID, 65535])
def test_nothing_of_an_unmapped_owner_can_be_changed_or_copied_up(server: Nsinit, directory: Path, owner: int) -> None:
    """A file of an owner outside the map can't be changed, neither by the owner's rights nor if everyone may write; the
    first id beyond the system's is a person's.
    """
    mine, open_to_all = _make(directory / "mine", owner, 0o644), _make(directory / "open", owner, 0o666)
    sandbox = server.build(host_plan())
    for command in (f"echo x >> {mine}", f"chmod 777 {mine}", f"rm -f {mine}", f"echo x >> {open_to_all}"):
        assert sandbox.run(command).code != 0, command
    assert not list((server.data_dir / "sessions" / sandbox.session_id / "usr").rglob("[mo]*"))
    sandbox.teardown()
    assert (mine.read_text(), open_to_all.read_text()) == ("mine\n", "open\n")


def test_system_owners_show_as_themselves(server: Nsinit, directory: Path) -> None:
    """Files of root and of the last system id keep their owner's number."""
    files = [_make(directory / str(owner), owner, 0o644) for owner in (0, SYSTEM_IDS - 1)]
    sandbox = server.build(host_plan())
    shown = sandbox.run("stat -c %u:%g " + " ".join(map(str, files))).out.split()
    assert shown == ["0:0", f"{SYSTEM_IDS - 1}:{SYSTEM_IDS - 1}"]
    sandbox.teardown()


def test_an_id_map_outlives_the_process_that_it_was_made_with() -> None:
    """Only the user namespace of the map is left, also when the mapping is refused; its descriptor tells the kind."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = os.listdir("/proc/self/fd"), children.read_text()
    userns_fd = make_id_map(f"0 {FIRST_BASE} {SYSTEM_IDS}\n")
    assert os.readlink(f"/proc/self/fd/{userns_fd}").startswith("user:[")
    os.close(userns_fd)
    with pytest.raises(OSError, match="Invalid argument"):
        make_id_map("no mapping\n")
    assert (os.listdir("/proc/self/fd"), children.read_text()) == before
