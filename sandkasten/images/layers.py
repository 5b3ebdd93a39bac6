"""Layers and images that are lists of them, through nsinit: what is unpacked, published, deleted and collected.

This process reads no byte of an archive and writes none into the store: nsinit gets the open file, and a name.
Blocking: call it from a thread. The link is an nsinit of the command line's own (`open_store`), beside a running
daemon's or without one, or the daemon's (`actors/services/nsinit.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import attrs

from nsinit.spawn import spawn_nsinit
from nsinit.wire import protocol
from nsinit.wire.protocol import ANSWERS, MAX_DATAGRAM_BYTES, MAX_DESCRIPTION_BYTES, REQUESTS, Failed, ProtocolError
from sandkasten.errors import (
    Conflict,
    DigestMismatch,
    DiskFull,
    ImageInUse,
    InvalidImage,
    LayerRefused,
    NsinitLost,
    SandkastenError,
)
from sandkasten.images.catalog import LAYER_DIGEST, now
from sandkasten.model.image import ImageConfig

MAX_ENTRIES = 2_000_000
"""Entries of a layer."""
MAX_BYTES = 64 * 1024**3
"""Bytes of a layer's files."""
LAYER_GRACE_S = 3600
"""Seconds that a layer stays which nobody has or has asked for: the image that it is for may be on its way."""
_END_S = 10.0
_PIECE_BYTES = 65536
_UNSENT = 0
_PREFIX = "sha256:"

A = TypeVar("A")


@attrs.frozen
class LayerMeta:
    """A layer of the store. `skipped`: members and attributes that were left out; `privileged`: files whose setuid or
    setgid bit was dropped. `is_new`: it was not in the store before."""

    diff_id: str
    entries: int
    size_bytes: int
    skipped: int
    privileged: int
    is_new: bool = attrs.field(default=True, eq=False)

    @classmethod
    def of(cls, found: protocol.LayerUnpacked) -> LayerMeta:
        """Return nsinit's answer as a layer."""
        return cls(found.digest, found.entries, found.size_bytes, found.skipped, found.privileged, found.is_new)


@attrs.frozen
class PackedLayer:
    """An archive that was written. `diff_id`: the digest of its bytes; `size_bytes`: of the archive; `skipped`: files
    and attributes that were left out."""

    diff_id: str
    entries: int
    size_bytes: int
    skipped: int

    @classmethod
    def of(cls, found: protocol.LayerPacked) -> PackedLayer:
        """Return nsinit's answer as an archive."""
        return cls(found.digest, found.entries, found.size_bytes, found.skipped)


class StoreLink(Protocol):
    """A way to an nsinit."""

    def ask(self, request: protocol.Request[A], fds: Sequence[int] = ()) -> A:
        """Send a request, whose `seq` the link sets, with descriptors, and return its answer.

        Raises:
            SandkastenError: what `refusal_of` makes of nsinit's failure.
            NsinitLost: nsinit died.
        """
        ...


class Layers:
    """The layers of one data directory."""

    def __init__(self, data_dir: Path, link: StoreLink) -> None:
        self._data_dir, self._directory = data_dir, data_dir / "layers"
        self._link = link

    def has(self, diff_id: str) -> bool:
        """Whether the store has a layer. It may be collected until an image has it; publishing tells."""
        return (
            LAYER_DIGEST.fullmatch(diff_id) is not None and (self._directory / diff_id.removeprefix(_PREFIX)).is_dir()
        )

    def find(self, diff_id: str) -> LayerMeta | None:
        """Return a layer of the store; None if it is not there, or can't be read."""
        return find_layer(self._data_dir, diff_id)

    def unpack_layer(
        self,
        blob_fd: int,
        diff_id: str = "",
        *,
        max_bytes: int = MAX_BYTES,
        max_entries: int = MAX_ENTRIES,
        reserve_bytes: int = 0,
    ) -> LayerMeta:
        """Unpack an archive, compressed or not, into a layer. `diff_id`: the digest that its tar stream must have,
        empty for any. `reserve_bytes`: the room that the disk keeps.

        Raises:
            LayerRefused: the archive can't be unpacked.
            DigestMismatch: the tar stream has another digest.
            DiskFull: the disk has no room for it.
            NsinitLost: nsinit died.
        """
        with asking() as asker_fd:
            request = protocol.UnpackLayer(_UNSENT, diff_id, max_bytes, max_entries, reserve_bytes)
            return LayerMeta.of(self._link.ask(request, (blob_fd, asker_fd)))

    def pack_layer(
        self, name: str, out_fd: int, *, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES
    ) -> PackedLayer:
        """Write a layer as a tar archive to a file or a pipe: the same bytes each time, and those that it was unpacked
        from if this wrote them. `name`: the layer's digest, or the name of an image that is no list of layers.

        Raises:
            LayerRefused: the layer has what an archive can't hold.
            InvalidImage: there is no such layer.
            DiskFull: the disk has no room for the archive.
            NsinitLost: nsinit died.
        """
        with asking() as asker_fd:
            request = protocol.PackLayer(_UNSENT, name, max_bytes, max_entries)
            return PackedLayer.of(self._link.ask(request, (out_fd, asker_fd)))

    def publish_image(
        self,
        name: str,
        *,
        layers: Sequence[str],
        config: ImageConfig,
        digest: str = "",
        source: str = "",
        platform: str = "",
        tags: Sequence[str] = (),
        repository: str = "",
        replace: bool = False,
        base_layers: int = 0,
    ) -> None:
        """Give layers, the lowest first, a name. The description has the sums of their files. `base_layers`: see
        `catalog.Image`.

        Raises:
            InvalidImage: the name is malformed or taken, or a layer is missing.
            NsinitLost: nsinit died.
        """
        found = [meta for each in set(layers) if (meta := self.find(each)) is not None]
        members, size_bytes = sum(meta.entries for meta in found), sum(meta.size_bytes for meta in found)
        said = members, size_bytes, repository, base_layers
        described = describe(layers, config, digest, source, platform, tags, *said)
        with description(described) as fd:
            self._link.ask(protocol.PublishImage(_UNSENT, name, tuple(layers), replace), (fd,))

    def delete_image(self, name: str) -> None:
        """Delete an image; its layers go with the next collection.

        Raises:
            ImageInUse: a session has it.
            InvalidImage: there is none.
        """
        self._link.ask(protocol.DeleteImage(_UNSENT, name))

    def collect(
        self, *, grace_s: int, kept: Sequence[str] = (), only: Sequence[str] = (), dry_run: bool = False
    ) -> protocol.LayersCollected:
        """Delete the layers that no image and no session has; see `nsinit.wire.protocol.CollectLayers`."""
        return self._link.ask(protocol.CollectLayers(_UNSENT, grace_s, tuple(kept), tuple(only), dry_run))


def find_layer(data_dir: Path, diff_id: str) -> LayerMeta | None:
    """Return a layer of a data directory, without an nsinit; None if it is not there, or can't be read."""
    if not LAYER_DIGEST.fullmatch(diff_id):
        return None
    try:
        said = json.loads((data_dir / "layers" / diff_id.removeprefix(_PREFIX) / "meta.json").read_bytes())
        counts = {name: int(said[name]) for name in ("entries", "size_bytes", "skipped", "privileged")}
        return LayerMeta(diff_id, **counts, is_new=False)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe(
    layers: Sequence[str],
    config: ImageConfig,
    digest: str,
    source: str,
    platform: str,
    tags: Sequence[str],
    members: int = 0,
    size_bytes: int = 0,
    repository: str = "",
    base_layers: int = 0,
) -> bytes:
    """Return the description of an image (`catalog.Image`, but for its name). Raises `InvalidImage`: too large."""
    said: dict[str, Any] = {
        "kind": "layers",
        "created_at": now(),
        "source": source,
        "members": members,
        "size_bytes": size_bytes,
        "layers": list(layers),
        "config": attrs.asdict(config),
        "digest": digest,
        "platform": platform,
        "tags": list(tags),
        "repository": repository,
        "base_layers": base_layers,
    }
    encoded = (json.dumps(said, indent=1) + "\n").encode()
    if len(encoded) > MAX_DESCRIPTION_BYTES:
        raise InvalidImage("the image's description is too large")
    return encoded


@contextlib.contextmanager
def description(content: bytes) -> Iterator[int]:
    """Open a file without a name that has a description; the daemon's own filter has no file in memory."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        yield file.fileno()


@contextlib.contextmanager
def asking() -> Iterator[int]:
    """Open the pipe's end by which nsinit learns that whoever asked for a layer is gone, as it is when this is left."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        yield read_fd
    finally:
        os.close(read_fd)
        os.close(write_fd)


def refusal_of(stage: str, number: int, path: str, message: str) -> SandkastenError:
    """Return the error that a failure of nsinit's stands for."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull("there is no room for the image on the disk")
    match stage, number:
        case "unpack", _:
            return LayerRefused(f"the archive can't be unpacked: {message}", member=path or None, reason=message)
        case "pack", errno.EBUSY | errno.ECANCELED | errno.ESRCH:
            return Conflict("the session went on, or ended, before all of it was copied")
        case "pack", errno.ENOENT:
            return InvalidImage("there is no such layer")
        case "pack", _:
            return LayerRefused(f"this can't be packed: {message}", member=path or None, reason=message)
        case "digest", _:
            return DigestMismatch(f"the layer is not what it is said to be: {message}")
        case "image", errno.EEXIST:
            return InvalidImage("there is an image of that name already")
        case "image", errno.ESTALE:
            return InvalidImage("a layer of the image is missing")
        case "image", errno.EBUSY:
            return ImageInUse("a session has the image")
        case "image", errno.ENOENT:
            return InvalidImage("there is no such image")
        case "grant", _:
            return InvalidImage(message)
        case _:
            return InvalidImage(f"{stage}: {message}")


class OwnNsinit:
    """An nsinit that serves the store alone, as a link."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._seqs = channel, itertools.count(1)

    def ask(self, request: protocol.Request[A], fds: Sequence[int] = ()) -> A:
        """See `StoreLink`."""
        numbered = _numbered(request, next(self._seqs))
        try:
            socket.send_fds(self._channel, [REQUESTS.encode(numbered)], fds)
            data = self._channel.recv(MAX_DATAGRAM_BYTES)
        except ConnectionError:
            data = b""
        try:
            answer = ANSWERS.decode(data)
        except ProtocolError:
            _lost()
        if isinstance(answer, Failed):
            raise refusal_of(answer.stage, answer.errno, answer.path, answer.message)
        if not isinstance(answer, protocol.answer_class(type(request))):
            _lost()
        return answer


@contextlib.contextmanager
def open_store(data_dir: Path, *, crash_at: str = "") -> Iterator[Layers]:
    """Start an nsinit for the store; when the block is left, nsinit and every process that it started have ended.

    Raises:
        NsinitLost: it died.
        InvalidImage: it refuses the directory.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log_fd, their_log_fd = os.pipe2(os.O_CLOEXEC)
    try:
        with ours:
            try:
                pid = spawn_nsinit(theirs.fileno(), their_log_fd)
            finally:
                theirs.close()
                os.close(their_log_fd)
            try:
                link = OwnNsinit(ours)
                link.ask(protocol.OpenStore(_UNSENT, os.path.realpath(data_dir), crash_at))
                yield Layers(data_dir, link)
            finally:
                ours.close()
                _wait_end(pid, log_fd)
    finally:
        os.close(log_fd)


def _numbered(request: protocol.Request[A], seq: int) -> protocol.Request[A]:
    return dataclasses.replace(request, seq=seq)  # type: ignore[type-var]  # every request is a dataclass with a seq


def _lost() -> NoReturn:
    raise NsinitLost("the fork server died during work on the image")


def _wait_end(pid: int, log_fd: int) -> None:
    """Wait until every process has closed the log, which all of them down to the jail inherit."""
    deadline = time.monotonic() + _END_S
    while select.select([log_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not os.read(log_fd, _PIECE_BYTES):
            break
    else:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still nsinit's
    os.waitpid(pid, 0)
