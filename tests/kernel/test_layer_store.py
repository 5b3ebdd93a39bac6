"""The store of layers without an nsinit around it: what it makes of records, drafts and neighbours."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tarfile
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from nsinit.kernel import syscalls
from nsinit.scheduler import Job, Scheduler, Wait
from nsinit.steps import StepFailed
from nsinit.storage.layers import DRAFT, IMAGE_DRAFT, LayerDirectory
from nsinit.storage.paths import Layout
from nsinit.storage.trash import remove_tree, start_deletion
from nsinit.wire.protocol import CollectLayers, PublishImage
from nsinit.wire.verdict import Counts, Unpacked
from sandkasten.cli import pull
from sandkasten.config import Config
from sandkasten.errors import DiskFull
from sandkasten.images.catalog import Catalog
from sandkasten.images.layers import description, open_store
from sandkasten.model.image import ImageConfig
from tests.kernel.harness import new_id, wait_until
from tests.waiting import patience

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

T = TypeVar("T")
HEX = "1" * 64
DIGEST = f"sha256:{HEX}"
SESSION = new_id()


@pytest.fixture
def store(tmp_path: Path) -> LayerDirectory:
    layout = Layout(str(tmp_path))
    layout.make_store()
    return LayerDirectory(layout)


def done(work: Generator[Wait, bool, T]) -> T:
    """Run a job to its end, and return its result."""
    results: list[T] = []
    scheduler = Scheduler()

    def job() -> Job:
        results.append((yield from work))

    scheduler.spawn(job())
    while scheduler.jobs:
        scheduler.round()
    scheduler.close()
    return results[0]


def keep_one(store: LayerDirectory, name: str = HEX) -> None:
    """Put an empty layer into the store, whose top somebody has opened to all."""
    draft = store.make_draft()
    os.chown(draft.files_fd, 1234, 1234)
    os.chmod(draft.files_fd, 0o777)
    done(store.keep(draft, Unpacked(Counts(0, 0, 0), name, (), ())))
    draft.close()


def test_the_top_of_a_layer_is_closed_whatever_the_unpacker_has_done(store: LayerDirectory) -> None:
    """A layer gets its name with a top that is root's, and closed to all others."""
    keep_one(store)
    found = os.stat(store.layout.layer_files(DIGEST))
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (0, 0, 0o700)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"{}", b'{"entries": {}}'])
def test_a_damaged_description_fails_what_reads_it(store: LayerDirectory, content: bytes) -> None:
    """A look-up and a collection end with an error that names the layer; no other layer is moved before."""
    names = [f"{number:064x}" for number in range(4)]
    for name in names:
        keep_one(store, name)
    Path(store.layout.layers, names[2], "meta.json").write_bytes(content)
    digests = tuple(f"sha256:{name}" for name in names)
    failures = []
    for work in (lambda: store.find(digests[2]), lambda: done(store.collect(CollectLayers(1, 0, only=digests)))):
        with pytest.raises(StepFailed) as caught:
            work()
        failures.append((caught.value.errno, caught.value.path))
    assert failures == [(errno.EUCLEAN, f"{store.layout.layers}/{names[2]}")] * 2
    assert sorted(os.listdir(store.layout.layers)) == names
    assert os.listdir(store.layout.trash) == []


@pytest.mark.parametrize("content", [b"", b"image\n", b"\xff\n", b"image\nsha256:11"])
def test_a_damaged_record_of_a_session_fails_a_collection(store: LayerDirectory, content: bytes) -> None:
    """No layer is moved while it is not known which ones that session has."""
    keep_one(store)
    record = Path(store.layout.session_use(SESSION))
    record.parent.mkdir(parents=True)
    record.write_bytes(content)
    with pytest.raises(StepFailed) as caught:
        done(store.collect(CollectLayers(1, 0)))
    assert (caught.value.errno, caught.value.path) == (errno.EUCLEAN, str(record))
    assert os.listdir(store.layout.layers) == [HEX]


def test_a_record_of_a_session_appears_whole(store: LayerDirectory) -> None:
    """A part of a record that a killed nsinit has left counts for nothing, and does not keep the next one away."""
    keep_one(store)
    record = Path(store.layout.session_use(SESSION))
    record.parent.mkdir(parents=True)
    record.with_name("image.new").write_text("image\nsha")
    assert done(store.collect(CollectLayers(1, 0, dry_run=True))).layers == 1
    store.note_use(SESSION, "image", [DIGEST])
    assert os.listdir(record.parent) == ["image"]
    assert done(store.collect(CollectLayers(1, 0, dry_run=True))).layers == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 MiB and 20000 inodes; tmpfs(5)."""
    path = tmp_path / "disk"
    path.mkdir()
    syscalls.mount("small", str(path), "tmpfs", 0, "size=256m,nr_inodes=20000,mode=700")
    try:
        yield path
    finally:
        syscalls.umount2(str(path), 0)


def headers(*members: tarfile.TarInfo) -> bytes:
    return b"".join(each.tobuf(tarfile.PAX_FORMAT) for each in members) + bytes(1024)


def test_names_without_content_leave_the_disk_its_inodes(small_disk: Path) -> None:
    """A reserve of half of the bytes is one of half of the inodes, for members and for directories on the way to
    them. Without a reserve, a file that is larger than the disk ends in its middle. Nothing is left of either."""
    members = [tarfile.TarInfo(f"{number}") for number in range(18_000)]
    deep = [tarfile.TarInfo(f"{number}/" + "d/" * 100) for number in range(180)]
    with open_store(small_disk) as store:
        for each in (members, deep):
            with tempfile.TemporaryFile() as file:
                file.write(headers(*each))
                file.seek(0)
                with pytest.raises(DiskFull):
                    store.unpack_layer(file.fileno(), reserve_bytes=128 << 20)
        with tempfile.TemporaryFile() as file:
            large = tarfile.TarInfo("large")
            large.size = 257 << 20
            file.write(headers(large))
            file.truncate(large.size + 4096)
            file.seek(0)
            with pytest.raises(DiskFull):
                store.unpack_layer(file.fileno())
    assert [list((small_disk / name).iterdir()) for name in ("layers", "trash")] == [[], []]


@contextlib.contextmanager
def blocked(store: LayerDirectory, work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread, with the store locked; the block begins once the thread waits for the lock, and when it
    is left the thread goes on to its end."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # told to the test
            failures.append(error)

    fd = os.open(store.layout.layers, os.O_RDONLY)
    inode = os.fstat(fd).st_ino
    thread = threading.Thread(target=run)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        thread.start()
        # proc_locks(5): "->" marks one that waits.
        wait_until(
            lambda: any("->" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines()),
            "it waits for the lock",
        )
        yield
    finally:
        os.close(fd)
        thread.join(patience(20))
    assert failures == []


def test_a_sweep_survives_a_draft_that_another_nsinit_removes(store: LayerDirectory) -> None:
    """Another nsinit may remove its draft between the look at the directory and the look at the draft."""
    draft = Path(store.layout.layers, f"{DRAFT}x")
    draft.mkdir()
    with blocked(store, store.share):
        draft.rmdir()


def test_a_layer_that_two_removals_take_is_no_leftover(store: LayerDirectory) -> None:
    """The end of an image removes its layers from the trash, which a deletion of the trash may have begun with."""

    def remove_twice(parent_fd: int, name: str) -> None:
        remove_tree(parent_fd, name)
        remove_tree(parent_fd, name)

    (Path(store.layout.trash) / "layer-0" / "fs").mkdir(parents=True)
    pidfd = start_deletion(store.layout, remove_twice)
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
    assert result is not None
    assert (result.si_status, os.listdir(store.layout.trash)) == (0, [])


def test_an_image_is_written_before_the_store_is_locked(store: LayerDirectory) -> None:
    """All of an image is on the disk when its publication asks for the lock, which others wait for. Of one
    whose layer is missing nothing stays."""
    keep_one(store)

    def publish() -> None:
        with description(b"{}") as fd:
            done(store.publish(PublishImage(1, "image", (DIGEST,)), fd))

    with blocked(store, publish):
        (draft,) = Path(store.layout.images).iterdir()
        assert sorted(os.listdir(draft)) == ["layers", "meta.json"]
        assert (draft.stat().st_mode & 0o777, (draft / "meta.json").stat().st_mode & 0o777) == (0o700, 0o640)
    assert store.layers_of("image") == (DIGEST,)
    missing = PublishImage(1, "other", (f"sha256:{'2' * 64}",))
    with description(b"{}") as fd, pytest.raises(StepFailed) as caught:
        done(store.publish(missing, fd))
    assert caught.value.errno == errno.ESTALE
    assert os.listdir(store.layout.images) == ["image"]


def test_a_draft_of_an_image_keeps_no_layer_and_no_collection_away(store: LayerDirectory) -> None:
    """A collection may meet a list that is being written; that publication fails if the layer is gone by then."""
    keep_one(store)
    draft = Path(store.layout.images, f"{IMAGE_DRAFT}x")
    draft.mkdir()
    (draft / "layers").touch()
    assert done(store.collect(CollectLayers(1, 0))).layers == 1


def test_who_speaks_to_a_registry_replaces_no_image_and_learns_of_no_directory(tmp_path: Path) -> None:
    """The process that stays root takes whether to replace from its arguments, and a path for no digest of a layer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    image = {"layers": [DIGEST], "config": {}, "digest": "", "source": "", "platform": "", "tags": [], "replace": True}
    questions = ({"kind": "publish", "image": image}, {"kind": "has", "layer": f"sha256:../layers/{HEX}"})
    for each in (*questions, {"kind": "done", "digest": DIGEST}):
        theirs.send(json.dumps(each).encode())
    config = Config(data_dir=tmp_path)
    with ours, theirs, open_store(tmp_path) as store:
        keep_one(LayerDirectory(Layout(str(tmp_path))))
        store.publish_image("taken", layers=[DIGEST], config=ImageConfig(), source="mine")
        shown = pull.Shown("", as_json=True)
        done = pull.serve_child(ours, store, config, "taken", shown, replace=False)
        assert done == pull.ImageDone("taken", DIGEST)
        answers = [json.loads(theirs.recv(4096)) for _ in questions]
        assert store.find(f"sha256:../layers/{HEX}") is None
    assert (answers[0]["code"], answers[1]) == ("INVALID_IMAGE", {"has": False})
    assert Catalog(tmp_path).get("taken").source == "mine"
