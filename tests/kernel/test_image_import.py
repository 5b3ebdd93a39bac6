"""An nsinit that is asked to unpack an archive: what it refuses, what the jail has, what the end of each one ends."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import lzma
import os
import select
import signal
import socket
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from nsinit.kernel.capabilities import IMPORT_CAPABILITIES, STORE_CAPABILITIES
from nsinit.spawn import spawn_nsinit
from nsinit.tools.jail import CHUNK_BYTES
from nsinit.tools.unpack import CAPABILITIES
from nsinit.wire.launching import Grant
from nsinit.wire.protocol import ANSWERS, MAX_DATAGRAM_BYTES, REQUESTS, Ok, OpenStore, PublishImage, Scan, UnpackLayer
from nsinit.wire.validate import MAX_BYTES
from sandkasten.errors import DigestMismatch, DiskFull, InvalidImage, LayerRefused, NsinitLost
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.images.layers import LayerMeta, open_store
from tests.allowance import ALLOWANCE
from tests.e2e.daemon import SCRIPT
from tests.kernel.harness import wait_until
from tests.kernel.test_images import assert_nothing_left
from tests.leaks import children
from tests.waiting import patience

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

PATIENCE_S = 20.0
STRANGER = 12345
EVERY = (1 << 20, 10)
"""Bounds of bytes and entries."""


def small_tar(*names: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names or ("file",):
            archive.addfile(tarfile.TarInfo(name))
    return content.getvalue()


def digest_of(tar: bytes) -> str:
    return f"sha256:{hashlib.sha256(tar).hexdigest()}"


@contextlib.contextmanager
def opened(content: bytes) -> Iterator[int]:
    """A file with that content, open at its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


def test_an_archive_becomes_a_layer_and_nothing_else(tmp_path: Path) -> None:
    """A layer has the digest of its tar stream as its name, compressed or not; an nsinit that was not started for
    sessions makes nothing for them."""
    tar = small_tar()
    with open_store(tmp_path / "data") as store:
        for content in (tar, gzip.compress(tar), zstd.compress(tar), lzma.compress(tar)):
            with opened(content) as fd:
                layer = store.unpack_layer(fd, digest_of(tar))
            assert layer == LayerMeta(digest_of(tar), 1, 0, 0, 0)
            assert layer.is_new is (content is tar)
        assert store.has(layer.diff_id)
        assert not store.has(f"sha256:{'0' * 64}")
    name = digest_of(tar).removeprefix("sha256:")
    assert sorted(str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*")) == [
        "images",
        "layers",
        *(
            f"layers/{name}{each}"
            for each in ("", "/fs", "/fs/file", "/listing", "/meta.json", "/opaque", "/privileged")
        ),
        "trash",
    ]


def test_what_has_another_digest_is_no_layer(tmp_path: Path) -> None:
    """The digest is that of the whole stream, bytes behind the end of the archive included. A stream with another
    leaves nothing, neither under its own name nor under the one that was asked for."""
    tar, data_dir = small_tar(), tmp_path / "data"
    with open_store(data_dir) as store:
        for content in (small_tar("other"), tar + bytes(512), tar[:-512]):
            with opened(content) as fd, pytest.raises(DigestMismatch, match=digest_of(content)):
                store.unpack_layer(fd, digest_of(tar))
        for content, words in (
            (gzip.compress(tar)[:-20], "ends before its end"),
            (b"", "no tar"),
            (b"x" * 2048, "no tar"),
        ):
            with opened(content) as fd, pytest.raises(LayerRefused, match=words):
                store.unpack_layer(fd)
        with opened(tar) as fd, pytest.raises(DiskFull):
            store.unpack_layer(fd, reserve_bytes=1 << 45)
    assert_nothing_left(data_dir)


@pytest.mark.parametrize("entries", [b'"many"', b"Infinity"])
def test_a_request_that_meets_damage_fails_alone(tmp_path: Path, entries: bytes) -> None:
    """The nsinit answers it with a failure, whether or not it knows that kind of damage, and serves the next one."""
    meta = tmp_path / "layers" / digest_of(small_tar()).removeprefix("sha256:") / "meta.json"
    with open_store(tmp_path) as store:
        with opened(small_tar()) as fd:
            store.unpack_layer(fd)
        meta.write_bytes(b'{"entries": ' + entries + b', "size_bytes": 0, "skipped": 0, "privileged": 0}')
        with opened(small_tar()) as fd, pytest.raises(InvalidImage):
            store.unpack_layer(fd, digest_of(small_tar()))
        with opened(small_tar("other")) as fd:
            assert store.unpack_layer(fd).is_new


def ask_raw(data_dir: Path, request: Any, fds: int, grant: Grant | None = None) -> Any:
    """Return what an nsinit of its own says to a request that no caller of ours makes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(patience(PATIENCE_S))
    with ours, open(os.devnull, "r+b") as null:
        with theirs:
            pid = spawn_nsinit(theirs.fileno(), null.fileno(), *([grant.encode()] if grant else []))
        ours.send(REQUESTS.encode(OpenStore(1, str(data_dir))))
        answer = ANSWERS.decode(ours.recv(MAX_DATAGRAM_BYTES))
        if isinstance(answer, Ok):
            socket.send_fds(ours, [REQUESTS.encode(request)], [null.fileno()] * fds)
            answer = ANSWERS.decode(ours.recv(MAX_DATAGRAM_BYTES))
    assert os.waitpid(pid, 0)[1] == 0
    return answer


def test_names_bounds_and_descriptors_are_checked_again(tmp_path: Path) -> None:
    """Requests are checked by the nsinit that gets them, whoever has checked them before; others are not served."""
    good = UnpackLayer(2, digest_of(b""), *EVERY)
    for request, fds, words in (
        (replace(good, digest="sha256:../x"), 2, "digest"),
        (replace(good, max_bytes=MAX_BYTES + 1), 2, "bytes"),
        (replace(good, max_entries=0), 2, "entries"),
        (good, 1, "descriptors"),
        (PublishImage(2, "../x", (digest_of(b""),)), 1, "image name"),
        (PublishImage(2, ".new-x", (digest_of(b""),)), 1, "image name"),
        (Scan(2), 0, "already started"),
    ):
        answer = ask_raw(tmp_path, request, fds)
        assert (answer.stage, words in answer.message) == ("validate", True), answer
    answer = ask_raw(tmp_path, good, 2, Grant(str(tmp_path), STRANGER, ALLOWANCE))
    assert (answer.stage, answer.message) == ("validate", "only root may open the store")
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("place", ["data", "data/images", "data/layers"])
def test_a_link_or_a_directory_of_somebody_else_is_refused(tmp_path: Path, place: str) -> None:
    """A link on the way to the store is refused, even if it leads to a sound directory; so is a directory of another
    user, who could exchange what is in it."""
    for each in ("images", "layers"):
        (tmp_path / "data" / each).mkdir(parents=True, exist_ok=True)
    os.chown(tmp_path / place, STRANGER, STRANGER)
    answer = ask_raw(tmp_path / "data", Scan(2), 0)
    assert (answer.stage, f"it belongs to user {STRANGER}" in answer.message) == ("data directory", True), answer
    os.chown(tmp_path / place, 0, 0)
    (tmp_path / place).rename(tmp_path / "elsewhere")
    (tmp_path / place).symlink_to(tmp_path / "elsewhere")
    assert ask_raw(tmp_path / "data", Scan(2), 0).stage == "data directory"


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
        self.data_dir = data_dir
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
        wait_until(lambda: list(data_dir.glob("layers/+new-*/fs/file")), "the first member is there")
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
        return [path.name for place in ("layers/+new-*", "trash/*") for path in self.data_dir.glob(place)]

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


def sweep(data_dir: Path) -> None:
    """Do what every start does: remove the drafts that nobody works on."""
    with open_store(data_dir):
        pass


def read_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_nsinit_keeps_what_the_jail_takes_to_make(importing: Import) -> None:
    """No network, few capabilities, and none to be had again; fewer in the part of the program outside of the jail."""
    for pid, capabilities in ((importing.nsinit, STORE_CAPABILITIES), (importing.outside, IMPORT_CAPABILITIES)):
        status = read_status(pid)
        kept = f"{capabilities:016x}"
        assert [status[name] for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs")] == [kept] * 3 + ["1"]
        assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def test_the_jail_has_the_image_and_nothing_else(importing: Import, data_dir: Path) -> None:
    """One mount, which is the draft; the standard streams and the listing; a filter, four capabilities and namespaces
    of its own."""
    proc = Path(f"/proc/{importing.jail}")
    status = read_status(importing.jail)
    powers = f"{sum(1 << each for each in CAPABILITIES):016x}"
    assert [status[name] for name in ("CapEff", "CapPrm", "CapBnd")] == [powers] * 3
    assert (status["NoNewPrivs"], status["Seccomp"], status["NSpid"].split()[1:]) == ("1", "2", ["1"])
    wait_until(lambda: sorted(os.listdir(proc / "fd")) == ["0", "1", "2", "4"], "it has closed the member")
    (mount,) = (proc / "mountinfo").read_text().splitlines()
    assert {"nosuid", "nodev", "noexec"} <= set(mount.split()[5].split(","))
    (draft,) = importing.drafts
    assert os.path.samefile(proc / "root", data_dir / "layers" / draft / "fs")
    for name in ("user", "mnt", "pid", "net", "ipc", "uts"):
        kind = "pid_for_children" if name == "pid" else name
        assert os.readlink(proc / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}")


def test_memory_does_not_grow_with_entries(importing: Import, tmp_path: Path) -> None:
    """Sixteen thousand files, links and attributes more take nsinit and the jail less than 32 bytes each. So a million
    is a matter of time."""
    kinds, sizes, begun = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE), [], 0
    with (tmp_path / "x.tar").open("wb") as fifo:
        for count in (8_000, 24_000):
            for number in range(begun, begun := count + CHUNK_BYTES // 512):  # the last ones may wait for a whole chunk
                member = tarfile.TarInfo(f"d{number // 900}/{number}")
                member.type = kinds[number % 3]
                member.linkname = f"d{number // 900}/{number // 3 * 3}" if number % 3 else ""
                member.pax_headers = {} if number % 3 else {"SCHILY.xattr.user.a": "b"}
                fifo.write(member.tobuf(tarfile.PAX_FORMAT))
            fifo.flush()
            (last,) = importing.data_dir.glob("layers/+new-*/fs")
            wait_until(lambda path=last / f"d{count // 900}/{count}": os.path.lexists(path), "the last member is there")
            sizes.append([int(read_status(pid)["VmRSS"].split()[0]) for pid in (importing.nsinit, importing.jail)])
    grown = [after - before for before, after in zip(*sizes, strict=True)]
    assert max(grown) < 512, sizes


def test_a_killed_command_line_leaves_neither_process_nor_draft(importing: Import) -> None:
    """nsinit notices, ends the processes of the unpacker, removes the draft and ends."""
    importing.process.kill()
    assert importing.wait_all() == -signal.SIGKILL
    assert importing.drafts == []


def test_a_sweep_leaves_a_draft_alone_that_is_being_filled(importing: Import) -> None:
    """The sweep at a daemon's start leaves the draft of an import that is under way."""
    sweep(importing.data_dir)
    assert len(importing.drafts) == 1
    assert importing.process.poll() is None


def test_an_interrupt_leaves_nothing(importing: Import) -> None:
    """Ctrl-C: no process, no draft, and the status that says so."""
    importing.process.send_signal(signal.SIGINT)
    assert importing.wait_all() == 130
    assert importing.drafts == []


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("nsinit", "the fork server died during work on the image"),
        ("outside", "the process that works on it died"),
        ("jail", "the process that works on it died"),
    ],
)
def test_the_death_of_a_part_ends_the_import_in_words(importing: Import, part: str, words: str) -> None:
    """The death of any process of an import ends the others, and is told to the person at the terminal. The draft is
    removed at once, or by the next nsinit if it was nsinit that died.
    """
    os.kill(getattr(importing, part), signal.SIGKILL)
    assert importing.wait_all() == 1
    assert importing.process.stderr is not None
    assert words in importing.process.stderr.read()
    if part == "nsinit":
        sweep(importing.data_dir)
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
        wait_until(lambda: list(tmp_path.glob("data/layers/+new-*/fs/file")), "the first member is there")
        (pid,) = children(os.getpid()) - known
        os.kill(pid, signal.SIGKILL)
        thread.join(patience(PATIENCE_S))
    assert len(failures) == 1
    assert list(tmp_path.glob("data/images/*")) == []


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
