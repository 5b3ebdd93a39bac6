"""An nsinit that is asked to unpack an archive: what it refuses, what the jail has, what the end of each one ends."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import signal
import socket
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.kernel.capabilities import IMPORT_CAPABILITIES
from nsinit.spawn import spawn_nsinit
from nsinit.tools.unpack import CAPABILITIES
from nsinit.wire.launching import Grant
from nsinit.wire.protocol import ANSWERS, MAX_DATAGRAM_BYTES, REQUESTS, Failed, Unpacked, UnpackImage
from nsinit.wire.validate import MAX_BYTES, MAX_INODES
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.model.errors import NsinitLost
from tests.allowance import ALLOWANCE
from tests.e2e.daemon import SCRIPT
from tests.kernel.harness import Nsinit, wait_until
from tests.leaks import children
from tests.waiting import patience

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

DRAFT = ".new-0123456789abcdef"
PATIENCE_S = 20.0
STRANGER = 12345


def small_tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    return content.getvalue()


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """An empty draft of an image in a data directory."""
    directory = tmp_path / "data/images" / DRAFT
    (directory / "rootfs").mkdir(parents=True)
    return directory


@pytest.fixture
def request_for(draft: Path) -> UnpackImage:
    """A request that would be done."""
    return UnpackImage(7, str(draft.parents[1]), DRAFT, 10, 1000)


@contextlib.contextmanager
def own_nsinit(grant: Grant | None = None) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(patience(PATIENCE_S))
    with ours:
        with theirs, open(os.devnull, "wb") as log:
            pid = spawn_nsinit(theirs.fileno(), log.fileno(), *([grant.encode()] if grant else []))
        try:
            yield ours
        finally:
            ours.close()
            assert os.waitpid(pid, 0)[1] == 0


def ask(request: UnpackImage, archive: bytes | None = None, grant: Grant | None = None) -> Unpacked | Failed:
    """Return what an nsinit of its own says; None as `archive` sends no descriptor."""
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as pipe, own_nsinit(grant) as channel:
        os.write(write_fd, archive or b"")
        os.close(write_fd)
        socket.send_fds(channel, [REQUESTS.encode(request)], [] if archive is None else [pipe.fileno()])
        answer = ANSWERS.decode(channel.recv(MAX_DATAGRAM_BYTES))
        assert channel.recv(1) == b""  # an import is the only job of this nsinit
    assert isinstance(answer, Unpacked | Failed)
    return answer


def refusal(request: UnpackImage, archive: bytes | None = b"no tar", grant: Grant | None = None) -> tuple[str, str]:
    """Return stage and message of a refusal."""
    answer = ask(request, archive, grant)
    assert isinstance(answer, Failed)
    assert answer.seq == request.seq
    return answer.stage, answer.message


def test_an_archive_is_unpacked_and_counted(draft: Path, request_for: UnpackImage) -> None:
    """An archive is unpacked by an nsinit that was not started and so makes nothing else in the data directory."""
    assert ask(request_for, small_tar()) == Unpacked(7, 1, 0, 0, 0)
    data_dir = draft.parents[1]
    assert sorted(str(path.relative_to(data_dir)) for path in data_dir.rglob("*")) == [
        "images",
        f"images/{DRAFT}",
        f"images/{DRAFT}/rootfs",
        f"images/{DRAFT}/rootfs/file",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_dir": "relative"}, "data directory"),
        ({"data_dir": "/tmp/../etc"}, "data directory"),
        ({"draft_name": "host"}, "draft"),
        ({"draft_name": f"../images/{DRAFT}"}, "draft"),
        ({"draft_name": f"{DRAFT}/rootfs"}, "draft"),
        ({"draft_name": ".new-0123456789abcdeg"}, "draft"),
        ({"draft_name": f"{DRAFT}\n"}, "draft"),
        ({"draft_name": ""}, "draft"),
        ({"max_members": 0}, "max_members"),
        ({"max_members": -1}, "max_members"),
        ({"max_members": MAX_INODES + 1}, "max_members"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": MAX_BYTES + 1}, "max_bytes"),
    ],
)
def test_names_and_bounds_are_checked_again(
    request_for: UnpackImage, draft: Path, change: dict[str, str | int], words: str
) -> None:
    """Names and bounds in the request are checked by nsinit, although the command line has checked them before."""
    stage, message = refusal(replace(request_for, **change))  # type: ignore[arg-type]
    assert (stage, words in message) == ("validate", True), message
    assert os.listdir(draft / "rootfs") == []


def test_there_is_no_archive_without_a_descriptor(request_for: UnpackImage) -> None:
    """A request to unpack that comes without a descriptor is refused."""
    assert refusal(request_for, None) == ("validate", "an archive comes as one descriptor")


def test_a_daemon_without_privilege_may_not_ask(request_for: UnpackImage, draft: Path) -> None:
    """A daemon without root has no archive unpacked: nsinit refuses the request and does not open the archive."""
    grant = Grant(request_for.data_dir, STRANGER, ALLOWANCE)
    assert refusal(request_for, small_tar(), grant) == ("validate", "only root may have an archive unpacked")
    assert os.listdir(draft / "rootfs") == []


def test_a_started_nsinit_does_not_unpack(shared: Nsinit) -> None:
    """An nsinit that serves sessions refuses to unpack an archive, which would keep it from other requests."""
    answer, _ = shared.ask(UnpackImage, data_dir=str(shared.data_dir), draft_name=DRAFT, max_members=1, max_bytes=1)
    assert (type(answer), answer.message) == (Failed, "already started")


@pytest.mark.parametrize("place", ["data", "data/images", f"data/images/{DRAFT}", f"data/images/{DRAFT}/rootfs"])
def test_a_link_on_the_way_is_refused(tmp_path: Path, request_for: UnpackImage, place: str) -> None:
    """A link on the way to the draft is refused, even if it leads to a sound directory."""
    (tmp_path / place).rename(tmp_path / "elsewhere")
    (tmp_path / place).symlink_to(tmp_path / "elsewhere")
    stage, message = refusal(request_for, small_tar())
    assert (stage, "symbolic links" in message) == ("draft", True), message
    assert not list(tmp_path.rglob("file"))


@pytest.mark.parametrize("place", ["data/images", f"data/images/{DRAFT}", f"data/images/{DRAFT}/rootfs"])
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, request_for: UnpackImage, place: str) -> None:
    """A directory of another user on the way to the draft is refused: its owner could exchange what is in it."""
    os.chown(tmp_path / place, STRANGER, STRANGER)
    stage, message = refusal(request_for, small_tar())
    assert (stage, f"it belongs to user {STRANGER}" in message) == ("draft", True), message
    assert not list(tmp_path.rglob("file"))


def test_a_draft_with_something_in_it_is_refused(draft: Path, request_for: UnpackImage) -> None:
    """A draft that is not empty is refused, so that no image or half of one is ever written into."""
    (draft / "rootfs/kept").write_text("same")
    assert refusal(request_for, small_tar()) == ("draft", "a draft is empty")
    assert os.listdir(draft / "rootfs") == ["kept"]


def test_a_draft_that_is_being_swept_is_refused(draft: Path, request_for: UnpackImage) -> None:
    """A draft whose lock is held is refused: a sweep holds the lock while it removes the draft, nsinit while it
    unpacks.
    """
    fd = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert refusal(request_for, small_tar())[0] == "draft"
    finally:
        os.close(fd)


# While it runs ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def endless(path: Path) -> Iterator[Path]:
    """An archive that begins and goes on for as long as the block: a FIFO that somebody has open."""
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    try:
        os.write(fd, small_tar()[:512])
        yield path
    finally:
        os.close(fd)


class Import:
    """`sandkasten image import` at work on an archive without end, with all that it started."""

    def __init__(self, data_dir: Path, tar: Path) -> None:
        self.catalog, self._images = Catalog(data_dir), data_dir / "images"
        heeding = ("env", "--default-signal=INT")  # what a shell starts in the background ignores it
        command = [
            *heeding,
            str(SCRIPT),
            "image",
            "import",
            "--data-dir",
            str(data_dir),
            "--name",
            "x",
            "--tar",
            str(tar),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: list(data_dir.glob("images/.new-*/rootfs/file")), "the first member is there")
        # The unpacking program has one process outside of the jail and one inside.
        (self.nsinit,) = children(self.process.pid)
        (self.outside,) = children(self.nsinit)
        (self.jail,) = children(self.outside)
        self._pidfds = [os.pidfd_open(pid) for pid in (self.process.pid, self.nsinit, self.outside, self.jail)]

    def wait_all(self) -> int:
        """Wait until none of them is left; return the exit status."""
        for pidfd in self._pidfds:
            assert select.select([pidfd], [], [], patience(PATIENCE_S))[0]
        return self.process.wait(patience(PATIENCE_S))

    @property
    def drafts(self) -> list[str]:
        return [name for name in os.listdir(self._images) if name.startswith(".new-")]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=patience(PATIENCE_S))
        for pidfd in self._pidfds:
            os.close(pidfd)


@pytest.fixture
def importing(data_dir: Path, tmp_path: Path) -> Iterator[Import]:
    with endless(tmp_path / "x.tar") as tar:
        started = Import(data_dir, tar)
        try:
            yield started
        finally:
            started.close()


def read_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_nsinit_keeps_what_the_jail_takes_to_make(importing: Import) -> None:
    """No network, five capabilities, and none to be had again; so has the part of the program outside of the jail."""
    for pid in (importing.nsinit, importing.outside):
        status = read_status(pid)
        kept = f"{IMPORT_CAPABILITIES:016x}"
        assert [status[name] for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs")] == [kept] * 3 + ["1"]
        assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def test_the_jail_has_the_image_and_nothing_else(importing: Import, data_dir: Path) -> None:
    """One mount, which is the draft; the standard streams; a filter, four capabilities and namespaces of its own."""
    proc = Path(f"/proc/{importing.jail}")
    status = read_status(importing.jail)
    powers = f"{sum(1 << each for each in CAPABILITIES):016x}"
    assert [status[name] for name in ("CapEff", "CapPrm", "CapBnd")] == [powers] * 3
    assert (status["NoNewPrivs"], status["Seccomp"], status["NSpid"].split()[1:]) == ("1", "2", ["1"])
    wait_until(lambda: sorted(os.listdir(proc / "fd")) == ["0", "1", "2"], "it has closed the member")
    (mount,) = (proc / "mountinfo").read_text().splitlines()
    assert {"nosuid", "nodev", "noexec"} <= set(mount.split()[5].split(","))
    (draft,) = importing.drafts
    assert os.path.samefile(proc / "root", data_dir / "images" / draft / "rootfs")
    for name in ("user", "mnt", "pid", "net", "ipc", "uts"):
        kind = "pid_for_children" if name == "pid" else name
        assert os.readlink(proc / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}")


def test_a_killed_command_line_leaves_no_process_and_the_sweep_no_draft(importing: Import) -> None:
    """Each of an import's four processes ends with the one before it, so none has to be found and killed."""
    importing.process.kill()
    assert importing.wait_all() == -signal.SIGKILL
    assert len(importing.drafts) == 1
    importing.catalog.sweep()
    assert importing.drafts == []


def test_a_sweep_leaves_a_draft_alone_that_is_being_filled(importing: Import) -> None:
    """The sweep at a daemon's start leaves the draft of an import that is under way."""
    importing.catalog.sweep()
    assert len(importing.drafts) == 1
    assert importing.process.poll() is None


def test_an_interrupt_leaves_nothing(importing: Import) -> None:
    """Ctrl-C: no process, no draft, and the status that says so."""
    importing.process.send_signal(signal.SIGINT)
    assert importing.wait_all() == 130
    assert importing.drafts == []


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("nsinit", "the fork server died during the unpacking of the archive"),
        ("outside", "the process that unpacks it died"),
        ("jail", "the process that unpacks it died"),
    ],
)
def test_the_death_of_a_part_ends_the_import_in_words(importing: Import, victim: str, words: str) -> None:
    """The death of any process of an import ends the others, removes the draft, and is told to the person at the
    terminal.
    """
    os.kill(getattr(importing, victim), signal.SIGKILL)
    assert importing.wait_all() == 1
    assert importing.process.stderr is not None
    assert words in importing.process.stderr.read()
    assert importing.drafts == []


def test_a_library_learns_of_the_death_of_nsinit(tmp_path: Path) -> None:
    """The death of nsinit during an import raises an error of its own type, as it is no fault of the archive."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            import_tar(Catalog(tmp_path / "data"), "x", tmp_path / "x.tar")
        except NsinitLost as error:
            failures.append(error)

    with endless(tmp_path / "x.tar"):
        known = children(os.getpid())
        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: list(tmp_path.glob("data/images/.new-*/rootfs/file")), "the first member is there")
        (pid,) = children(os.getpid()) - known
        os.kill(pid, signal.SIGKILL)
        thread.join(patience(PATIENCE_S))
    assert len(failures) == 1
    assert os.listdir(tmp_path / "data/images") == []


def test_mounts_of_the_jail_do_not_spread(data_dir: Path, tmp_path: Path) -> None:
    """The jail works and leaves no mount where mounts are shared with other namespaces, as under systemd."""
    tar, before, said = (tmp_path / name for name in ("x.tar", "before", "said"))
    tar.write_bytes(small_tar())
    steps = (
        "mount --make-rshared /",
        f"cp /proc/self/mountinfo {before}",
        f"! {SCRIPT} image import --data-dir {data_dir} --name x --tar {tar} 2>{said}",
        f"cmp {before} /proc/self/mountinfo",
        f"grep -q shared: {before}",
    )
    subprocess.run(["unshare", "-m", "sh", "-ec", " && ".join(steps)], check=True)
    assert "there is no shell" in said.read_text()  # so the archive was unpacked
