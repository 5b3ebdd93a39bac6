"""Messages about layers and images, all that an nsinit for the image store alone serves (`OpenStore`). Sans-I/O.

The class of all requests stands here, too, below both parts of the contract. `protocol` has the vocabulary of both;
import the names from there.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from runner.wire.codec import dataclass

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Request(Generic[A_co]):
    """A message to nsinit. Its class names the class of the answer, in place of which `Failed` may come."""

    __slots__ = ()


MAX_IMAGE_LAYERS = 127
"""The most layers that an image may have."""
MAX_DESCRIPTION_BYTES = 1 << 20
"""The most bytes of an image's description."""


@dataclass(frozen=True, slots=True)
class UnpackLayer(Request["LayerUnpacked"]):
    """Unpack the archive that comes along into a layer, named by the digest of its tar stream, which the process that
    reads the archive says. `digest`: what that must be (`sha256:` and 64 hex digits); empty takes any. A layer that is
    there already is not unpacked again.

    Descriptors: the archive, open for reading, and the end of a pipe: when all other ends of that are closed, the
    unpacking ends. More entries, or bytes of files, than allowed are a failure, and so is a disk with less left than
    `reserve_bytes`. `Failed.stage`: `unpack`, the sentence is about the archive and `path` is the member's name;
    `digest`, it has another.
    """

    seq: int
    digest: str
    max_bytes: int
    max_entries: int
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackLayer(Request["LayerPacked"]):
    """Write a layer as a tar archive, the same bytes each time. `name`: its digest; or that of an image that is no list
    of layers, whose files are taken for one.

    Descriptors: that to write to, and the end of a pipe as with `UnpackLayer`. `Failed.stage`: `pack`, the sentence is
    about the layer and `path` is a name in it. `Failed` with `ENOENT`: there is no such layer; `EPIPE`: nobody reads.
    """

    seq: int
    name: str
    max_bytes: int
    max_entries: int


@dataclass(frozen=True, slots=True)
class PackSession(Request["LayerPacked"]):
    """Write what a session has above the lowest `base_layers` of its layers as the tar archive of a layer: by default
    what it has changed; with 0, or of an image that is no list of layers, all that it sees. The session must stand
    still; a request that lets it go on, or its teardown, ends the packing. Other requests about it do not wait.

    Descriptors and `Failed` as with `PackLayer`; with `EBUSY`: the session runs; `ECANCELED`: it goes on, or has ended.
    """

    seq: int
    session_id: str
    max_bytes: int
    max_entries: int
    base_layers: int = MAX_IMAGE_LAYERS


@dataclass(frozen=True, slots=True)
class PublishImage(Request["Ok"]):
    """Give layers, the lowest first, and a description a name, in one step. The description is the file that comes
    along; nobody here reads it. With `replace` it takes the place of the image of that name. Not for a daemon that may
    use some images only.

    `Failed` with `EEXIST`: there is one, and `replace` is false; `ESTALE`: a layer is missing.
    """

    seq: int
    name: str
    layers: tuple[str, ...]
    replace: bool = False


@dataclass(frozen=True, slots=True)
class DeleteImage(Request["Ok"]):
    """Delete an image; its layers stay until they are collected. Not for a daemon that may use some images only.

    `Failed` with `EBUSY`: a session has it; `ENOENT`: there is none.
    """

    seq: int
    name: str


@dataclass(frozen=True, slots=True)
class CollectLayers(Request["LayersCollected"]):
    """Delete the layers that no image and no session has, and that are not in `kept`, once nobody has asked for them
    for `grace_s`. With `only`, none but those. With `dry_run` they are counted."""

    seq: int
    grace_s: int
    kept: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class LayerUnpacked:
    """The layer is there. `entries`: members of the archive. `skipped`: members and attributes that were left out;
    `privileged`: files whose setuid or setgid bit was dropped. `is_new`: it was not there before."""

    seq: int
    digest: str
    entries: int
    size_bytes: int
    skipped: int
    privileged: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class LayerPacked:
    """The archive is written. `digest`: of its bytes; `entries`: its members; `size_bytes`: of the archive; `skipped`:
    files and attributes that were left out. `below`: the layers that it belongs on, the lowest first, of a session."""

    seq: int
    digest: str
    entries: int
    size_bytes: int
    skipped: int
    below: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayersCollected:
    """The number of layers that are deleted, and bytes of their files."""

    seq: int
    layers: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Ok:
    seq: int
