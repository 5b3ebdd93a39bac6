"""Images: an import beside tar, a pull beside skopeo and umoci, the memory of the jail that unpacks, and creates on an
image that just came and on images of many layers.

The files are the machine's own, in an order by chance. A registry of the distribution's has them, compressed, below a
layer with a shell. What a pull or an import has made is on the disk when it ends; so the peers are followed by a sync,
and both rows are there, with the sync and without. Source: sync(1).
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import trio

from bench import daemon
from bench.measure import busy_s
from sandkasten.images.layers import open_store
from sandkasten.images.registry.documents import Platform
from sandkasten.model.image import ImageConfig
from tests import debian, image_tools
from tests.registry import digest_of

if TYPE_CHECKING:
    from bench.sections import Bench

IMPORT, TAR, TAR_ALONE = "import of a tar", "tar -x and sync", "tar -x"
PULL, PEERS, PEERS_ALONE = "pull and unpack", "skopeo, umoci and sync", "skopeo copy and umoci unpack"
FRESH, WARM = "create and first command, image just pulled", "create and first command, image in use before"
JAIL_MIB = "peak of the unpacker's jail, MiB"
_IMPORT_BYTES, _PULL_BYTES = 220_000_000, 150_000_000
LAYERS, _FEW_LAYERS = (1, 11, 51, 127), (1, 3)
_SHARE_OF_ALL = 0.5
"""From this share of a run on, files are as many as in the report, and so are layers."""
SIZE_FACT, FULL_SIZE = "tar of an import, MB", round(_IMPORT_BYTES / 1e6)
_PROGRAMS = ("sh", "echo", "cat", "ls")
_LARGEST_BYTES = 16 << 20
_LOOK_S, _SETTLE_S = 0.05, 0.03
_JOB_S = 120.0


def layers_row(count: int) -> str:
    return f"create, image of {count} layer{'s' * (count > 1)}"


async def images(bench: Bench) -> None:
    """Creates on images of some layers; then, in turn, so that a slow disk leaves each row as many samples, an import
    and a pull with a session on what it brought, each beside others' tools."""
    scratch, data_dir = bench.scratch / "images", bench.scratch / "images-data"
    scratch.mkdir()
    size = min(1.0, bench.share / _SHARE_OF_ALL)
    counts = LAYERS if bench.share >= _SHARE_OF_ALL else _FEW_LAYERS
    _make_layers(data_dir, counts)
    with ExitStack() as stack:
        _pid, address = stack.enter_context(daemon.running(data_dir, SANDKASTEN_SERVER_POOL_SANDBOXES="0"))
        client = stack.enter_context(daemon.Client(address))
        rows = {layers_row(count): f"layers-{count}" for count in counts}
        for name in bench.rounds([*rows], 40):
            await trio.sleep(_SETTLE_S)
            _create(bench, name, client, rows[name])
        seen = stack.enter_context(_jail_memory())
        archive = scratch / "tree.tar"
        archive.write_bytes(_tree(round(_IMPORT_BYTES * size)))
        bench.facts[SIZE_FACT] = round(_IMPORT_BYTES * size / 1e6)
        works = {name: partial(_import, bench, name, archive, scratch / "tree") for name in (IMPORT, TAR)}
        try:
            tools = stack.enter_context(image_tools.running(scratch))
        except debian.Unavailable as error:
            bench.facts[f"{PULL}: not measured"] = str(error)
        else:
            await _push(tools, [_shell(), _tree(round(_PULL_BYTES * size))])
            works[PULL] = partial(_pull_and_use, bench, client, tools)
            works[PEERS] = partial(_pull_by_peers, bench, tools)
        busy: dict[str, list[float]] = {name: [] for name in works}
        for name in bench.rounds([*works], 6, 1):
            before = busy_s()
            works[name]()
            busy[name].append(busy_s() - before)
            _sync(scratch)  # so that the next row does not wait for it
        for name, spent in busy.items():
            bench.facts[f"{name}, machine CPU, s"] = round(median(spent), 2)
        bench.facts[JAIL_MIB] = round(max(seen) / 1024, 1)


def _make_layers(data_dir: Path, counts: Sequence[int]) -> None:
    """Make images of so many layers each, all of which have the same directories."""
    with open_store(data_dir) as store:
        found = []
        for number in range(max(counts)):
            with tempfile.TemporaryFile() as file:
                file.write(_file_in(f"usr/lib/all/{number}") if number else _shell())
                file.seek(0)
                found.append(store.unpack_layer(file.fileno()).diff_id)
        for count in counts:
            store.publish_image(f"layers-{count}", layers=found[:count], config=ImageConfig())


def _file_in(path: str) -> bytes:
    """Return a tar of an empty file and the directories above it."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            _add(archive, "/".join(parts[:depth]), tarfile.DIRTYPE)
        _add(archive, path, tarfile.REGTYPE)
    return target.getvalue()


@cache
def _files() -> Sequence[str]:
    """Return the machine's files, in an order by chance that is the same each time."""
    found = sorted(
        path
        for directory, _, names in os.walk("/usr")
        for name in names
        if not os.path.islink(path := f"{directory}/{name}") and os.stat(path).st_size < _LARGEST_BYTES
    )
    random.Random(1).shuffle(found)
    return found


def _tree(size: int) -> bytes:
    """Return a tar of some of the machine's files."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _files():
            if target.tell() >= size:
                break
            archive.add(path)
    return target.getvalue()


def _shell() -> bytes:
    """Return a tar of a system with a shell."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        archive.add(shutil.which("busybox") or "/bin/busybox", "bin/busybox", filter=_plain)
        for name in _PROGRAMS:
            _add(archive, f"bin/{name}", tarfile.SYMTYPE, linkname="busybox")
        _add(archive, "etc", tarfile.DIRTYPE)
    return target.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode = 0o755
    return member


def _add(archive: tarfile.TarFile, name: str, kind: bytes, **fields: Any) -> None:  # fields of a member
    member = tarfile.TarInfo(name)
    member.type, member.mode = kind, 0o755
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member)


def _import(bench: Bench, name: str, archive: Path, target: Path) -> None:
    target.mkdir()
    if name == IMPORT:
        # The tar of a few files of /usr has no shell, which an import asks for.
        with bench.table.timed(IMPORT), open_store(target) as store, archive.open("rb") as file:
            layer = store.unpack_layer(file.fileno())
            store.publish_image("tree", layers=[layer.diff_id], config=ImageConfig())
    else:
        with bench.table.timed(TAR):
            with bench.table.timed(TAR_ALONE):
                subprocess.run(["tar", "-x", "-f", archive, "-C", target], check=True)
            _sync(target)
    shutil.rmtree(target)


def _sync(directory: Path) -> None:
    subprocess.run(["sync", "--file-system", directory], check=True)


@contextmanager
def _jail_memory() -> Iterator[Sequence[int]]:
    """Look again and again at the peak memory of jails that unpack; yield a list of what was seen, in KiB."""
    seen, done = [0], threading.Event()

    def look() -> None:
        known, jails = {*os.listdir("/proc")}, set[str]()
        while not done.wait(_LOOK_S):
            found = {*os.listdir("/proc")}
            jails = {pid for pid in found - known | jails if b"/unpack.py\0" in _read(f"/proc/{pid}/cmdline")}
            known = found
            for pid in jails:
                lines = _read(f"/proc/{pid}/status").splitlines()
                seen.extend(int(line.split()[1]) for line in lines if line.startswith(b"VmHWM"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _read(path: str) -> bytes:
    """Return what a file of a process says; nothing when that has ended."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


async def _push(tools: image_tools.Tools, layers: Sequence[bytes]) -> None:
    await _wait_for(tools)
    _write_layout(tools.directory / "layout", layers)
    tools.push("v1")


def _source(tools: image_tools.Tools) -> str:
    return f"{tools.place}/team/image:v1"


def _pull_and_use(bench: Bench, client: daemon.Client, tools: image_tools.Tools) -> None:
    with bench.table.timed(PULL):
        _pull(client, _source(tools))
    for row in (FRESH, WARM):
        time.sleep(_SETTLE_S)
        _create(bench, row, client, "image", "echo ok")
    client.call("DELETE", "/v1/images/image")


def _pull_by_peers(bench: Bench, tools: image_tools.Tools) -> None:
    with bench.table.timed(PEERS):
        with bench.table.timed(PEERS_ALONE):
            tools.copy("--src-tls-verify=false", f"docker://{_source(tools)}", "oci:copy:v1")
            tools.make("unpack", "--image", "copy:v1", "bundle")
        _sync(tools.directory)
    shutil.rmtree(tools.directory / "copy")
    shutil.rmtree(tools.directory / "bundle")


async def _wait_for(tools: image_tools.Tools) -> None:
    with trio.fail_after(10):
        while not await tools.answers():  # noqa: ASYNC110 - another program opens the port
            await trio.sleep(0.02)


def _write_layout(directory: Path, layers: Sequence[bytes]) -> None:
    """Write an OCI layout of an image of compressed layers (image-layout.md)."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(data: bytes, kind: str) -> Mapping[str, Any]:
        digest = digest_of(data)
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": len(data)}

    own = Platform.own()
    rootfs = {"type": "layers", "diff_ids": [digest_of(each) for each in layers]}
    config = {"architecture": own.architecture, "os": own.os, "config": {}, "rootfs": rootfs}
    manifest = {
        "schemaVersion": 2,
        "config": add(json.dumps(config).encode(), "config.v1+json"),
        "layers": [add(zlib.compress(each, 3, wbits=31), "layer.v1.tar+gzip") for each in layers],
    }
    entry = add(json.dumps(manifest).encode(), "manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [{**entry, "annotations": {"org.opencontainers.image.ref.name": "v1"}}]}
    (directory / "index.json").write_text(json.dumps(index))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def _pull(client: daemon.Client, reference: str) -> None:
    job = client.call("POST", "/v1/images/pull", {"reference": reference})["job_id"]
    end = time.monotonic() + _JOB_S
    while (state := (told := client.call("GET", f"/v1/jobs/{job}"))["state"]) in ("queued", "running"):
        if time.monotonic() > end:
            raise TimeoutError("the pull goes on and on")
        time.sleep(_SETTLE_S)
    if state != "done":
        raise RuntimeError(f"the pull {state}: {told['error']}")


def _create(bench: Bench, row: str, client: daemon.Client, image: str, command: str = "") -> None:
    """Create a session, with a first command or without, and end it."""
    session = ""
    with bench.table.timed(row):
        session = client.call("POST", "/v1/sessions", {"image": image})["id"]
        if command and client.call("POST", f"/v1/sessions/{session}/exec", {"cmd": command})["output"] != "ok\n":
            raise RuntimeError("a wrong answer")
    client.call("DELETE", f"/v1/sessions/{session}")
