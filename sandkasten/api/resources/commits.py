"""Commits: an image made of a session."""

from __future__ import annotations

import attrs

from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.resources.fields import Argv, Environment, Labels, Paths, Text, read_request
from sandkasten.api.resources.images import ImageBody
from sandkasten.api.resources.jobs import ImageName
from sandkasten.model.image import CommitSpec, ConfigChanges


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
