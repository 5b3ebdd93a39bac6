"""Images of the node: what there is, what may go, and those made of sessions. `jobs.py` has how others come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NewType

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.resources.fields import (
    Argv,
    Between,
    Environment,
    Labels,
    Paths,
    Text,
    add_kinds,
    read_query,
    read_request,
)
from sandkasten.api.resources.jobs import ImageName
from sandkasten.api.resources.sessions import DoneBody
from sandkasten.model.image import CommitSpec, ConfigChanges, ImageDescription

GraceSeconds = NewType("GraceSeconds", int)
add_kinds({GraceSeconds: Between(0, 31_536_000)})

_GRACE = GraceSeconds(3600)


@attrs.frozen
class ImagesQuery:
    """The query of a list of images: the name or alias of one, by default all."""

    name: str | None = None


@attrs.frozen
class ImageQuery:
    """The query that names an image. A path would not do: an image may be called as a request is."""

    name: str


@attrs.frozen
class PruneRequest:
    """A removal of layers that nobody has had for `older_than_s`; with `dry_run` they are counted."""

    older_than_s: GraceSeconds = _GRACE
    dry_run: bool = False


@attrs.frozen(kw_only=True)
class ImageConfigBody(Body):
    """The configuration that an image brings."""

    env: Mapping[str, str]
    working_dir: str
    user: str
    entrypoint: Sequence[str]
    cmd: Sequence[str]
    labels: Mapping[str, str]
    exposed_ports: Sequence[str]
    volumes: Sequence[str]
    stop_signal: str


@attrs.frozen(kw_only=True)
class ImageLayerBody(Body):
    """A layer of an image, unpacked."""

    digest: str
    entries: int
    size_bytes: int


@attrs.frozen(kw_only=True)
class ImageBody(Body):
    """An image. `digest` and `platform` are empty for one that came from no registry."""

    name: str
    kind: str
    source: str
    created_at: str
    digest: str
    platform: str
    tags: Sequence[str]
    alias_names: Sequence[str]
    size_bytes: int
    config: ImageConfigBody
    layers: Sequence[ImageLayerBody]

    @classmethod
    def of(cls, image: ImageDescription) -> ImageBody:
        """Return the body of an image."""
        layers = [ImageLayerBody.take(each) for each in image.layers]
        return cls.take(image, config=ImageConfigBody.take(image.config), layers=layers)


@attrs.frozen(kw_only=True)
class ImagesBody(Body):
    """All images, by name."""

    images: Sequence[ImageBody]


@attrs.frozen(kw_only=True)
class PrunedBody(Body):
    """Layers that were removed, or would be, and the bytes of their files."""

    layers: int
    freed_bytes: int


async def list_images(exchange: Exchange) -> Answer:
    """List the images by name, or that of one name or alias."""
    name = read_query(exchange, ImagesQuery).name
    supervisor = exchange.supervisor
    found = await supervisor.images() if name is None else [await supervisor.image(name)]
    return json_answer(ImagesBody(images=[ImageBody.of(each) for each in found]))


async def delete(exchange: Exchange) -> Answer:
    """Delete an image that no session has, with the layers that no other image has."""
    await exchange.supervisor.delete_image(read_query(exchange, ImageQuery).name)
    return json_answer(DoneBody())


async def prune(exchange: Exchange) -> Answer:
    """Remove the layers that no image, session or pull has."""
    request = await read_request(exchange, PruneRequest)
    found = await exchange.supervisor.prune_images(older_than_s=request.older_than_s, dry_run=request.dry_run)
    return json_answer(PrunedBody.take(found))


@attrs.frozen
class ConfigRequest:
    """The configuration of an image where it is other than that of the session's image. Variables and labels are added
    to what is there."""

    env: Environment | None = None
    working_dir: Text | None = None
    user: Text | None = None
    entrypoint: Argv | None = None
    cmd: Argv | None = None
    labels: Labels | None = None
    exposed_ports: Paths | None = None


@attrs.frozen
class CommitImageRequest:
    """An image to make of a session. With `replace` it takes the place of an image of that name."""

    name: ImageName
    config: ConfigRequest | None = None
    replace: bool = False

    def to_spec(self) -> CommitSpec:
        """Return the model's spec."""
        config = ConfigChanges() if self.config is None else ConfigChanges(**attrs.asdict(self.config, recurse=False))
        return CommitSpec(self.name, config, self.replace)


async def commit(exchange: Exchange) -> Answer:
    """Make an image of what a session has changed above its own. The session stands still for as long as the copy
    takes."""
    spec = (await read_request(exchange, CommitImageRequest)).to_spec()
    found = await exchange.supervisor.commit_session(exchange.session_id, spec)
    return json_answer(ImageBody.of(found), status=201)
