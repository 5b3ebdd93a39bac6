"""Changes of sessions written as layers: another session on that layer sees what the first one saw."""

from __future__ import annotations

import errno
import io
import os
import socket
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nsinit.wire.protocol import (
    REQUESTS,
    Failed,
    LayerPacked,
    LayerUnpacked,
    Ok,
    PackSession,
    SandboxPlan,
    SetFrozen,
    Teardown,
    TornDown,
    UnpackLayer,
)
from runner.wire.protocol import Setup
from tests.kernel.harness import ROOMY, Nsinit, Sandbox, data_directory, make_rootfs_image, new_id, rootfs_plan, running
from tests.kernel.test_layers import ask, base_content, base_layer, publish, publish_on, tar_of

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

BOUNDS: dict[str, Any] = {"max_bytes": 64 << 20, "max_entries": 10_000}
LISTING = """cd /; for each in bin etc one two kept gone moved over d new type over home root; do
busybox find $each -exec busybox stat -c '%n %F %a %u %g %Y %t' {} + ; done 2>/dev/null |
busybox grep -v -e '^etc ' -e ^etc/host -e /.wh.odd -e fifo -e ^etc/resolv -e ^home | sort
busybox cat one/sub/f kept/a moved/deep/x over/new d/tied new/file type
busybox readlink d/link; busybox stat -c '%s %b' new/hole
busybox stat -c %h d/tied"""
CHANGES = """cd /; PATH=$PATH:/tmp; busybox --install -s /tmp
rm -r one; mv two one
rm -r gone; rm kept/b; mv deep moved; rm -r over; mkdir over; echo new > over/new; rm -r type; echo file > type
mkdir -p d new/empty; echo file > new/file; chmod 4711 new/file; chown 77:88 new/file; ln new/file d/tied
ln -s /nowhere d/link
rm -r was; ln -s kept was; echo changed >> kept/a; chmod 700 kept; truncate -s 1M new/hole; mkfifo new/fifo
mkdir d/.wh.odd
echo mine > etc/hostname; echo aside > /tmp/aside; echo aside > /workspace/aside; touch $(printf 'new/\\377')"""


@pytest.fixture(scope="module")
def data_dir() -> Iterator[Path]:
    with data_directory() as path:
        yield path


@pytest.fixture(scope="module")
def server(data_dir: Path) -> Iterator[Nsinit]:
    with running(data_dir) as server:
        yield server


def build(server: Nsinit, name: str, layers: Sequence[str]) -> Sandbox:
    plan = SandboxPlan(new_id(), name, "layers", ROOMY, layers=tuple(layers), root_inside=True)
    return server.build(plan, Setup(user="root"))


def pack(server: Nsinit, session_id: str, **asked: int) -> tuple[Any, bytes]:
    """Freeze a session, pack it and let it go on; return the answer and the archive."""
    asker, end = os.pipe()
    with tempfile.TemporaryFile() as file:
        assert isinstance(server.ask(SetFrozen, session_id=session_id, frozen=True)[0], Ok)
        answer = ask(server, PackSession, file.fileno(), asker, **{"session_id": session_id, **BOUNDS, **asked})
        assert isinstance(server.ask(SetFrozen, session_id=session_id, frozen=False)[0], Ok)
        file.seek(0)
        for fd in (asker, end):
            os.close(fd)
        return answer, file.read()


LOWER: dict[str, bytes | str | None] = {
    "kept": None,
    "kept/a": b"a",
    "kept/b": b"b",
    "gone": None,
    "gone/x": b"",
    "deep": None,
    "deep/deep": None,
    "deep/deep/x": b"deep",
    "over": None,
    "over/old": b"",
    "type": None,
    "type/x": b"",
    "was": None,
    "was/x": b"",
    "one": None,
    "one/sub": None,
    "one/sub/f": b"one",
    "two": None,
    "two/sub": None,
    "two/sub/f": b"two",
    "same": None,
    "same/x": b"not read again",
    "etc/hostname": b"the image's own",
}


def unpack(server: Nsinit, archive: bytes) -> LayerUnpacked:
    asker, end = os.pipe()
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        answer = ask(server, UnpackLayer, file.fileno(), asker, digest="", **BOUNDS)
        for fd in (asker, end):
            os.close(fd)
    assert isinstance(answer, LayerUnpacked), answer
    return answer


@pytest.mark.parametrize("several", [True, False], ids=["several layers", "one layer"])
def test_a_session_on_the_layer_sees_what_the_packed_one_saw(data_dir: Path, server: Nsinit, several: bool) -> None:
    """A layer of changes hides names that are gone, and has renamed and replaced directories, changed kinds, modes,
    owners, links, holes and names that are no UTF-8. It has nothing else: no content that did not change, nothing of
    what is mounted, no file that each session is given anew. What no archive can hold is counted."""
    tars = [base_layer(), tar_of(LOWER), tar_of({"kept": None, "kept/c": b"c"})]
    if not several:
        tars = [tar_of({**base_content(), **LOWER, "kept/c": b"c"})]
    name = f"below-{len(tars)}"
    layers = publish(data_dir, name, *tars)
    box = build(server, name, layers)
    told = box.run(CHANGES)
    assert (told.code, told.err) == (0, "")
    before = box.run(LISTING).out
    answer, archive = pack(server, box.session_id)
    assert isinstance(answer, LayerPacked), answer
    assert (answer.below, answer.skipped, answer.size_bytes) == (layers, 2, len(archive))
    unpacked = unpack(server, archive)
    assert unpacked.digest == answer.digest
    assert pack(server, box.session_id)[1] == archive
    with tarfile.open(fileobj=io.BytesIO(archive)) as read:
        members = {each.name for each in read}
    assert members >= {".wh.gone", ".wh.deep", "kept/.wh.b", "over/.wh.old", "new/hole", "d/tied", "moved/deep/x"}
    assert not {
        each for each in members if each.startswith(("same", "tmp/", "workspace/", "proc/", "dev/", "etc/host"))
    }
    assert b"aside" not in archive
    box.teardown()
    publish_on(data_dir, f"{name}-changed", (*layers, answer.digest))
    again = build(server, f"{name}-changed", (*layers, answer.digest))
    assert again.run(LISTING).out == before
    assert len(before) > 1000
    again.teardown()


def test_an_image_that_is_no_list_becomes_one_layer(data_dir: Path, server: Nsinit) -> None:
    """All that its session sees of its root is in the layer."""
    make_rootfs_image(data_dir, "plain")
    box = server.build(rootfs_plan("plain"))
    answer, archive = pack(server, box.session_id)
    with tarfile.open(fileobj=io.BytesIO(archive)) as read:
        assert {"bin/busybox", "bin/sh", "etc/passwd", "home/sandbox"} <= {each.name for each in read}
    assert answer.below == ()
    box.teardown()


def test_layers_and_changes_become_one_layer_on_request(data_dir: Path, server: Nsinit) -> None:
    """Another session sees what the packed one saw: on the one layer of all, and on that of what is above some layers,
    with those. Files have the setuid bits that their own layer says, the topmost that has them; what the session has
    put in their places has none of a layer's. Marks are for what the layers below have alone."""
    names = ("kept/su", "kept/over", "kept/mine")
    lower = tar_of({**LOWER, **dict.fromkeys(names, b"su")}, **{name: {"mode": 0o4755} for name in names})
    middle = {"same": None, "same/.wh.x": b"", "one": None, "one/sub": None, "one/sub/.wh.f": b"", "one/g": b"middle"}
    upper = tar_of(
        {"kept": None, "kept/over": b"su", "kept/third": b"", "brief": b""}, **{"kept/third": {"mode": 0o4755}}
    )
    layers = publish(data_dir, "parts", base_layer(), lower, tar_of(middle), upper)
    box = build(server, "parts", layers)
    told = box.run(f"{CHANGES}; rm brief; echo su > kept/mine; echo mine > kept/own; chmod 755 kept/own")
    assert (told.code, told.err) == (0, "")
    before = box.run(LISTING).out
    assert box.run("chmod 6755 /kept/own").code == 0
    packed = [pack(server, box.session_id, base_layers=kept) for kept in (0, 2, 4)]
    box.teardown()
    own = {"kept/own": 0o6755}
    gone = {".wh.deep", ".wh.gone", ".wh.two", "kept/.wh.b", "over/.wh.old"}
    for kept, has, lacks, marks, privileged in (
        (0, {"bin/busybox", "kept/a"}, {"brief"}, set(), {**own, "kept/su": 0o4755, "kept/third": 0o4755}),
        (
            2,
            {"kept/over", "moved/deep/x"},
            {"bin/busybox", "kept/su"},
            {*gone, "same/.wh.x"},
            {**own, "kept/third": 0o4755},
        ),
        (4, {"moved/deep/x"}, {"bin/busybox", "kept/third", "same"}, {*gone, ".wh.brief", "one/.wh.g"}, own),
    ):
        answer, archive = packed.pop(0)
        assert isinstance(answer, LayerPacked), answer
        assert unpack(server, archive).digest == answer.digest
        with tarfile.open(fileobj=io.BytesIO(archive)) as read:
            modes = {each.name: each.mode for each in read}
        assert has <= modes.keys(), kept
        assert not lacks & modes.keys(), kept
        assert {name for name in modes if ".wh." in name} == marks
        assert {name: mode for name, mode in modes.items() if mode & 0o6000} == privileged
        publish_on(data_dir, f"kept-{kept}", (*layers[:kept], answer.digest))
        again = build(server, f"kept-{kept}", (*layers[:kept], answer.digest))
        assert again.run(LISTING).out == before
        again.teardown()


def test_a_session_that_runs_or_has_too_much_is_not_packed(data_dir: Path, server: Nsinit) -> None:
    """A session is packed only while it stands still. A huge file with a hole, more entries than allowed, and a path
    longer than a path can be are refused with their names. A session that goes on, or ends, ends its packing, and
    nothing of either is left."""
    layers = publish(data_dir, "bounds", base_layer())
    box = build(server, "bounds", layers)
    asker, end = os.pipe()
    read_fd, write_fd = os.pipe()
    refused = ask(server, PackSession, write_fd, asker, session_id=box.session_id, **BOUNDS)
    assert (refused.stage, refused.errno) == ("pack", errno.EBUSY)
    assert box.run("busybox truncate -s 15G /huge").code == 0
    refused, _ = pack(server, box.session_id)
    assert (refused.stage, refused.path) == ("pack", "huge")
    refused, _ = pack(server, box.session_id, max_entries=1)
    assert "more than 1 entries" in refused.message
    deep = (
        "busybox rm /huge; n=$(busybox printf %0250d 0); long=; for i in 1 2 3 4 5 6 7 8 9 10; do long=$long/$n; done; "
        "busybox mkdir -p $long /more$long && mv /more $long"
    )
    assert box.run(deep).code == 0
    refused, _ = pack(server, box.session_id)
    assert "File name too long" in refused.message
    assert box.run("busybox head -c 8388608 /dev/zero > /!full").code == 0

    def begin() -> None:
        server.ask(SetFrozen, session_id=box.session_id, frozen=True)
        request = REQUESTS.encode(PackSession(next(server._seq), box.session_id, **BOUNDS))
        socket.send_fds(server.channel, [request], [write_fd, asker])
        assert os.read(read_fd, 1)  # it is at work, and will wait for a reader

    begin()
    server.send(SetFrozen, session_id=box.session_id, frozen=False)
    answers = [server.receive()[0] for _ in range(2)]
    assert {(type(each), getattr(each, "errno", 0)) for each in answers} == {(Ok, 0), (Failed, errno.ECANCELED)}
    begin()
    box.release()
    server.send(Teardown, session_id=box.session_id)
    answers = [server.receive()[0] for _ in range(2)]
    assert {type(each) for each in answers} == {Failed, TornDown}
    assert server.traces(box.session_id) == []
    for fd in (asker, end, read_fd, write_fd):
        os.close(fd)
