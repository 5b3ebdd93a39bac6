"""The configuration of an image: what its maker says about running programs of it. Source: the OCI image specification
(config.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from sandkasten.errors import InvalidImage

Compression = Literal["gzip", "zstd", "none"]
"""Of the layers of an exported image."""
COMPRESSIONS: tuple[Compression, ...] = ("gzip", "zstd", "none")
MAX_CONFIG_BYTES = 256 * 1024
"""Bytes of a configuration as JSON."""


@attrs.frozen
class ImageConfig:
    """The fields that are kept. `env` is below a session's own; `user` is a name or ids of the image's accounts;
    `exposed_ports` and `volumes` are listed and have no effect. `history` says what has made each of the topmost
    layers, as far as that is known."""

    env: Mapping[str, str] = attrs.field(factory=dict)
    working_dir: str = ""
    user: str = ""
    entrypoint: Sequence[str] = ()
    cmd: Sequence[str] = ()
    labels: Mapping[str, str] = attrs.field(factory=dict)
    exposed_ports: Sequence[str] = ()
    volumes: Sequence[str] = ()
    stop_signal: str = ""
    history: Sequence[str] = ()

    @classmethod
    def from_stored(cls, said: Mapping[str, Any]) -> ImageConfig:
        """Return the configuration in an image's description. Raises `TypeError`, `ValueError`."""
        fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in said.items()}
        config = cls(**fields)
        for name in attrs.fields_dict(cls):
            value, default = getattr(config, name), getattr(_NONE, name)
            parts = (*value, *value.values()) if isinstance(value, dict) else value
            if type(value) is not type(default) or not all(isinstance(each, str) for each in parts):
                raise TypeError(f"{name} of an image's configuration is of another type")
        return config

    @classmethod
    def from_oci(cls, said: Mapping[str, Any]) -> ImageConfig:
        """Return the configuration in the `config` of an OCI image, or of a docker-archive's.

        Raises:
            InvalidImage: it is too large, or not of the form that the specification gives it.
        """
        if len(json.dumps(said)) > MAX_CONFIG_BYTES:
            raise InvalidImage(f"the image's configuration is larger than {MAX_CONFIG_BYTES >> 10} KiB")
        env = [each.partition("=") for each in said.get("Env") or ()]
        try:
            return cls.from_stored(
                {
                    "env": {name: value for name, _, value in env if name},
                    "working_dir": said.get("WorkingDir") or "",
                    "user": said.get("User") or "",
                    "entrypoint": _words(said.get("Entrypoint")),
                    "cmd": _words(said.get("Cmd")),
                    "labels": dict(said.get("Labels") or {}),
                    "exposed_ports": sorted(said.get("ExposedPorts") or ()),
                    "volumes": sorted(said.get("Volumes") or ()),
                    "stop_signal": said.get("StopSignal") or "",
                }
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidImage(f"the image's configuration is malformed: {error}") from error

    @property
    def command(self) -> tuple[str, ...]:
        """The program that the image is made to run, with its arguments; empty: none."""
        return (*self.entrypoint, *self.cmd)

    def to_oci(self) -> dict[str, Any]:
        """Return the `config` of an OCI image; fields without a value are left out."""
        said = {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": self.working_dir,
            "User": self.user,
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.cmd),
            "Labels": dict(self.labels),
            "ExposedPorts": {each: {} for each in self.exposed_ports},
            "Volumes": {each: {} for each in self.volumes},
            "StopSignal": self.stop_signal,
        }
        return {name: value for name, value in said.items() if value}


_NONE = ImageConfig()


@attrs.frozen
class ConfigChanges:
    """Changes of a configuration: None leaves a field; `env` and `labels` are added to what is there."""

    env: Mapping[str, str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: Sequence[str] | None = None
    cmd: Sequence[str] | None = None
    labels: Mapping[str, str] | None = None
    exposed_ports: Sequence[str] | None = None

    def apply(self, config: ImageConfig) -> ImageConfig:
        """Return the changed configuration. Raises `InvalidImage`: it would be too large."""
        fields: dict[str, Any] = {}
        for name, value in attrs.asdict(self).items():
            if isinstance(value, dict):
                fields[name] = {**getattr(config, name), **value}
            elif value is not None:
                fields[name] = value if isinstance(value, str) else tuple(value)
        changed = attrs.evolve(config, **fields)
        if len(json.dumps(changed.to_oci())) > MAX_CONFIG_BYTES:
            raise InvalidImage(f"the image's configuration is larger than {MAX_CONFIG_BYTES >> 10} KiB")
        return changed


@attrs.frozen
class CommitSpec:
    """A commit that is asked for: the image's name, and what is other than in the session's image. `replace`: take the
    place of an image of that name. `created_by` is for the history: what has made the layer, if there is one. `squash`:
    the layer has what earlier commits have added, too."""

    name: str
    config: ConfigChanges = attrs.field(factory=ConfigChanges)
    replace: bool = False
    created_by: str = "commit"
    squash: bool = False


def _words(said: str | Sequence[str] | None) -> list[str]:
    """Return the words of a command: old archives have a string for the shell."""
    return ["/bin/sh", "-c", said] if isinstance(said, str) else list(said or ())


@attrs.frozen
class ImageLayer:
    """One layer of an image: its digest, unpacked, and what is in it."""

    digest: str
    entries: int
    size_bytes: int


@attrs.frozen
class ImageUses:
    """Users of an image: live sessions, by id, and session pools, by their names in the configuration."""

    sessions: Sequence[str] = ()
    pools: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.sessions or self.pools)


@attrs.frozen
class ImageDescription:
    """One image of the node. `digest` is its manifest's, of an image that came from a registry or an OCI layout;
    `references` are its tags as users write them; `layers`, from the bottom, are empty for an image that is no list of
    them. `shared_bytes` are those of `size_bytes` in layers that other images have as well. `problems` are known when
    one image is asked for."""

    name: str
    kind: str
    source: str
    created_at: str
    digest: str
    platform: str
    tags: Sequence[str]
    alias_names: Sequence[str]
    size_bytes: int
    config: ImageConfig
    layers: Sequence[ImageLayer]
    references: Sequence[str] = ()
    shared_bytes: int = 0
    in_use: ImageUses = attrs.field(factory=ImageUses)
    problems: Sequence[str] | None = None


@attrs.frozen
class Pruned:
    """Layers, broken downloads and images of builds' caches that were removed, or would be, and the bytes of their
    files."""

    layers: int
    freed_bytes: int
    blobs: int = 0
    images: int = 0
