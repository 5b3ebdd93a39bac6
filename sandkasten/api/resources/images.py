"""Images of the node: what there is, what may go, and those made of sessions. `jobs.py` has how others come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NewType, cast

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import Body
from sandkasten.api.http.key_scope import within
from sandkasten.api.resources.fields import (
    Between,
    Choice,
    Environment,
    LabelFilter,
    Labels,
    ListLimit,
    Matching,
    NameCursor,
    Paths,
    Text,
    Words,
    add_kinds,
    encode_cursor,
    read_query,
    read_request,
)
from sandkasten.api.resources.file_archives import TYPES
from sandkasten.api.resources.file_entries import FIRST_PAGE
from sandkasten.api.resources.sessions import DEFAULT_LIST, DoneBody
from sandkasten.model import NEW_IMAGE
from sandkasten.model.image import COMPRESSIONS, CommitSpec, Compression, ConfigChanges, ImageDescription
from sandkasten.model.keys import Access, ApiKey
from sandkasten.model.listing import LabelSelector

GraceSeconds = NewType("GraceSeconds", int)
NewImageName = NewType("NewImageName", str)
add_kinds({GraceSeconds: Between(0, 31_536_000)})
add_kinds(
    {NewImageName: Matching(NEW_IMAGE, "must be 1 to 64 of a-z, A-Z, 0-9, '.', '_', '-', no sign first, or NAME:TAG")}
)

LayerCompression = NewType("LayerCompression", str)
add_kinds({LayerCompression: Choice(COMPRESSIONS)})

_GZIP = LayerCompression("gzip")
_GRACE = GraceSeconds(3600)
_COMMIT = Text("commit")


@attrs.frozen
class ImagesQuery:
    """The query of a list of images: the name or alias of one, by default all. `label`, of the image's configuration,
    is `NAME` or `NAME=VALUE`, and may come more than once."""

    name: str | None = None
    label: tuple[LabelFilter, ...] = ()
    limit: ListLimit = DEFAULT_LIST
    cursor: NameCursor = FIRST_PAGE


@attrs.frozen
class ImageQuery:
    """The query that names an image."""

    name: str


@attrs.frozen
class PruneRequest:
    """A removal of layers and broken downloads that nobody has had for `older_than_s`; with `dry_run` they are
    counted."""

    older_than_s: GraceSeconds = _GRACE
    dry_run: bool = False


@attrs.frozen
class ImageExportQuery:
    """The query of an export: how the layers in the archive are compressed."""

    compression: LayerCompression = _GZIP


@attrs.frozen(kw_only=True)
class ImageConfigBody(Body):
    """The configuration that an image brings. `history` says what has made each of the topmost layers, as far as that
    is known."""

    env: Mapping[str, str]
    working_dir: str
    user: str
    entrypoint: Sequence[str]
    cmd: Sequence[str]
    labels: Mapping[str, str]
    exposed_ports: Sequence[str]
    volumes: Sequence[str]
    stop_signal: str
    history: Sequence[str]


@attrs.frozen(kw_only=True)
class ImageLayerBody(Body):
    """A layer of an image, unpacked."""

    digest: str
    entries: int
    size_bytes: int


@attrs.frozen(kw_only=True)
class ImageUsesBody(Body):
    """The live sessions that an image was asked for, as far as the key reaches, and the pools that name it."""

    sessions: Sequence[str]
    pools: Sequence[str]


@attrs.frozen(kw_only=True)
class ImageBody(Body):
    """An image. `digest` and `platform` are empty for one that came from no registry. `references` are its tags as
    requests name them. `shared_bytes` of its `size_bytes` are in layers of other images, too. `problems` are told of
    one image alone."""

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
    references: Sequence[str]
    shared_bytes: int
    in_use: ImageUsesBody
    problems: Sequence[str] | None = None

    @classmethod
    def of(cls, image: ImageDescription) -> ImageBody:
        """Return the body of an image."""
        layers = [ImageLayerBody.take(each) for each in image.layers]
        uses = ImageUsesBody.take(image.in_use)
        return cls.take(image, config=ImageConfigBody.take(image.config), layers=layers, in_use=uses)


@attrs.frozen(kw_only=True)
class ImagesBody(Body):
    """A page of images, by name; without `next_cursor` the last one."""

    images: Sequence[ImageBody]
    next_cursor: str | None = None


@attrs.frozen(kw_only=True)
class PrunedBody(Body):
    """Layers, broken downloads and images of builds' caches that were removed, or would be, and the bytes of their
    files."""

    layers: int
    blobs: int
    images: int
    freed_bytes: int


async def list_images(exchange: Exchange) -> Answer:
    """List the images by name, or that of one name, reference or alias.

    A key that is no administrator's sees those that sessions may have.
    """
    query = read_query(exchange, ImagesQuery)
    if query.name is not None:
        return json_answer(ImagesBody(images=[ImageBody.of(await _look_up(exchange, query.name))]))
    selectors = [LabelSelector(*text.split("=", 1)) for text in query.label]
    key = exchange.key
    found = [
        image
        for image in await exchange.supervisor.images(within=within(key), is_bounded=_is_bounded(key))
        if image.name > query.cursor and all(each.is_on(image.config.labels) for each in selectors)
    ]
    shown = found[: query.limit]
    cursor = encode_cursor(shown[-1].name) if len(found) > query.limit else None
    return json_answer(ImagesBody(images=[ImageBody.of(each) for each in shown], next_cursor=cursor))


async def get(exchange: Exchange) -> Answer:
    """Read an image, by its name, a reference or an alias."""
    return json_answer(ImageBody.of(await _look_up(exchange, exchange.params["name"])))


async def _look_up(exchange: Exchange, name: str) -> ImageDescription:
    key = exchange.key
    return await exchange.supervisor.image(name, within=within(key), is_bounded=_is_bounded(key))


def _is_bounded(key: ApiKey) -> bool:
    return key.access < Access.ADMIN or key.label is not None


async def delete(exchange: Exchange) -> Answer:
    """Delete an image that no session and no pool names, with the layers that no other image has."""
    await exchange.supervisor.delete_image(read_query(exchange, ImageQuery).name)
    return json_answer(DoneBody())


async def remove(exchange: Exchange) -> Answer:
    """Delete an image that no session and no pool names, with the layers that no other image has."""
    await exchange.supervisor.delete_image(exchange.params["name"])
    return json_answer(DoneBody())


async def export(exchange: Exchange) -> None:
    """Download an image as the tar of an OCI image layout."""
    await exchange.drop_body()
    await exchange.until_disconnect(lambda: _export(exchange, read_query(exchange, ImageExportQuery).compression))


async def _export(exchange: Exchange, compression: LayerCompression) -> None:
    image = await exchange.supervisor.image(exchange.params["name"])
    disposition = f'attachment; filename="{image.name}.tar"'
    headers = (("content-type", TYPES["tar"]), ("content-disposition", disposition))
    if exchange.method == "HEAD":
        await exchange.start(200, headers)
        await exchange.finish()
        return
    async with exchange.supervisor.export_image(image.name, cast(Compression, compression)) as read:
        if piece := await read():  # else the export has failed, which leaving the context tells
            await exchange.start(200, headers)
        while piece:
            await exchange.write(piece)
            piece = await read()
    await exchange.finish()


async def prune(exchange: Exchange) -> Answer:
    """Remove the layers that no image, session or pull has, broken downloads, and what builds keep for later ones."""
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
    entrypoint: Words | None = None
    cmd: Words | None = None
    labels: Labels | None = None
    exposed_ports: Paths | None = None


@attrs.frozen
class CommitImageRequest:
    """An image to make of a session. Its `name` may be NAME:TAG. With `replace` it takes the place of the image of that
    name. `created_by` is for the history of its layers. With `squash` the layer has what earlier commits have added,
    too, and is above the layers that they began with."""

    name: NewImageName
    config: ConfigRequest | None = None
    replace: bool = False
    created_by: Text = _COMMIT
    squash: bool = False

    def to_spec(self) -> CommitSpec:
        """Return the model's spec."""
        config = ConfigChanges() if self.config is None else ConfigChanges(**attrs.asdict(self.config, recurse=False))
        return CommitSpec(self.name, config, self.replace, self.created_by, self.squash)


async def commit(exchange: Exchange) -> Answer:
    """Make an image of what a session has changed above its own, while the session stands still."""
    spec = (await read_request(exchange, CommitImageRequest)).to_spec()
    found = await exchange.until_disconnect(lambda: exchange.supervisor.commit_session(exchange.session_id, spec))
    return json_answer(ImageBody.of(found), status=201)
