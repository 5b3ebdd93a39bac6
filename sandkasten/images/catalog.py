"""The image store: `<data_dir>/images/<name>/{meta.json,rootfs/}`, names, aliases, set-aside images. Images that are
lists of layers are published by nsinit (`layers.py`); here they are read.

Owns the names of images and decides when their files may go. An image that was replaced or deleted may be the lower
layer of a running session, so it is renamed into `images/.retired/` and removed only when `<data_dir>/sessions` is
empty. New images are built in `images/.new-*` and appear by rename(2), whole or not at all.

`share_store` and `share_image` let the daemon's group read names and `meta.json`; the files of images stay root's. They
run as root, on directories that only root may change, and open no link. The maker of an image calls `share_image`
before the image gets its name; a start calls `share_store` for those there are. Blocking: call it from a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import attrs

from sandkasten.config import ConfigError
from sandkasten.errors import InvalidImage, InvalidReference
from sandkasten.image_names import BUILD_CACHE
from sandkasten.images import rootfs
from sandkasten.images.registry.reference import Reference, parse_reference
from sandkasten.images.removal import remove_tree
from sandkasten.model import IMAGE_NAME, IMAGE_REFERENCE, NEW_IMAGE
from sandkasten.model.image import ImageConfig

META = "meta.json"
HOST = "host"
_RETIRED = ".retired"
_NEW = ".new-"
LAYER_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_MALFORMED = "image name is malformed; it is NAME, NAME:TAG or REGISTRY/REPOSITORY[:TAG], each with @DIGEST or without"
_MOST_NEAR = 5
_DIRECTORY = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
Stamp = tuple[object, object]
"""For a name, modification time and inode of `meta.json` of its image and of the image that it is an alias of; for any
other reference, those of all images."""


@attrs.frozen
class Image:
    """One image of the store. `kind` host: the machine's own `/usr` belongs below it."""

    name: str
    kind: Literal["host", "rootfs", "layers"]
    created_at: str
    source: str
    fingerprint: str = ""
    members: int = 0
    size_bytes: int = 0
    layers: Sequence[str] = attrs.field(default=(), converter=tuple)
    """The layers of an image of that kind, the lowest first."""
    config: ImageConfig = attrs.field(factory=ImageConfig)
    digest: str = ""
    """The digest of its manifest, of an image that came from a registry or an OCI layout."""
    platform: str = ""
    tags: Sequence[str] = attrs.field(default=(), converter=tuple)
    repository: str = ""
    """The name that its tag belongs to, of an image that was made here as NAME:TAG."""
    base_layers: int = 0
    """Number of its layers, from the lowest, that the image had which commits began with; 0: all of them."""

    @property
    def base(self) -> int:
        """The number of layers, from the lowest, that no commit has made."""
        return self.base_layers or len(self.layers)

    @property
    def is_cached_step(self) -> bool:
        """Whether a build keeps it for later ones: nobody asks for it by name."""
        return self.name.startswith(BUILD_CACHE)

    @property
    def origin(self) -> Reference | None:
        """Reference that was pulled, of an image that came from a registry."""
        if not self.digest:
            return None
        try:
            return parse_reference(self.source)
        except InvalidReference:
            return None

    @property
    def family(self) -> str:
        """The name that its tags belong to: `debian` of `debian-trixie`, which was pulled beside image `debian`."""
        if self.repository:
            return self.repository
        origin = self.origin
        return origin.short_name if origin is not None and self.name == origin.second_name else self.name

    @property
    def references(self) -> list[str]:
        """Tags as users write them."""
        return [f"{self.family}:{tag}" for tag in self.tags]

    def has(self, tag: str | None, digest: str | None) -> bool:
        """Whether a reference with that tag and digest means it: a digest counts, and else the tag."""
        return digest == self.digest if digest else tag in self.tags


def check_name(name: str) -> None:
    """Raise `InvalidImage` unless an image can have the name."""
    if not IMAGE_NAME.match(name):
        raise InvalidImage("image name is malformed", image=name[:64])


class Catalog:
    """The images of one data directory."""

    def __init__(
        self, data_dir: Path, *, aliases: Mapping[str, str] | None = None, allowed: Sequence[str] = ()
    ) -> None:
        self.data_dir = data_dir
        self._directory, self._layers = data_dir / "images", data_dir / "layers"
        self._sessions = data_dir / "sessions"
        self._aliases = dict(aliases or {})
        self._allowed = frozenset(allowed)

    def trees(self, name: str) -> Sequence[Path]:
        """Return the directories of an image's files, the topmost first; those of layers are root's to read."""
        image = self._read(name)
        if image is None or image.kind != "layers":
            return (self._directory / name / "rootfs",)
        return [self.layer(each) for each in reversed(image.layers)]

    def layer(self, digest: str) -> Path:
        """Return the directory of a layer's files."""
        return self._layers / digest.removeprefix("sha256:") / "fs"

    def images(self) -> list[Image]:
        """Return all images, by name. A directory without a readable `meta.json` is no image."""
        if not self._directory.is_dir():
            return []
        found = (self._read(name) for name in sorted(os.listdir(self._directory)) if IMAGE_NAME.match(name))
        return [image for image in found if image is not None]

    def shown(self) -> list[Image]:
        """Return the images that lists have: all but steps of builds."""
        return [image for image in self.images() if not image.is_cached_step]

    def cached_steps(self, older_than_s: float) -> list[Image]:
        """Return the images that builds keep and have kept for so long."""
        before = datetime.now(UTC) - timedelta(seconds=older_than_s)
        return [image for image in self.images() if image.is_cached_step and _is_before(image.created_at, before)]

    def aliases_of(self, name: str) -> list[str]:
        """Return the aliases of an image; an image of the same name hides an alias."""
        found = (each for each, target in self._aliases.items() if self._find(each) is None)
        return sorted(each for each in found if self._is_of(self._aliases[each], name))

    def _is_of(self, reference: str, name: str) -> bool:
        """Whether a name or reference, which is no alias, means the image of that name."""
        if IMAGE_NAME.match(reference):
            return reference == name
        image = self._find(reference)
        return image is not None and image.name == name

    def get(self, name: str) -> Image:
        """Return the image that a name, a reference or else an alias means.

        Raises:
            InvalidImage: malformed, not present, or neither the name nor its target is allowed.
        """
        image = self.look_up(name)
        if not self.allows(name, image):
            raise InvalidImage(f"image {name!r} is not allowed", image=name)
        return image

    def look_up(self, name: str) -> Image:
        """Return an image as `get` does, also one that sessions may not have."""
        if not IMAGE_REFERENCE.match(name):
            raise InvalidImage(_MALFORMED, image=name[:64])
        image = self._find(name) or self._find(self._aliases.get(name, ""))
        if image is None:
            raise InvalidImage(f"there is no image {name!r}{self._near(name)}", image=name)
        return image

    def allows(self, name: str, image: Image) -> bool:
        """Whether an image may be used by a name: `allowed_images` has one of both, or a reference of the image."""
        if not self._allowed or self._allowed & {name, image.name}:
            return True
        return any(not IMAGE_NAME.match(each) and self._is_of(each, image.name) for each in self._allowed)

    def allowed(self) -> list[Image]:
        """Return the images that may be used by some name, by name."""
        return [each for each in self.shown() if self.allows(each.name, each) or self._is_allowed_as_alias(each)]

    def _is_allowed_as_alias(self, image: Image) -> bool:
        return not self._allowed.isdisjoint(self.aliases_of(image.name))

    def require_changeable(self) -> None:
        """Refuse a change of images, before the work for it, where nsinit refuses it at the end: root has said which
        images there are, and this process is not root. Raises `InvalidImage`."""
        if self._allowed and os.geteuid() != 0:
            raise InvalidImage("allowed_images is set: `sandkasten image` as root, on the node, changes images")

    def names_of(self, references: Iterable[str]) -> list[str]:
        """Return the names of the images that names, references and aliases mean, present or not. For a reference of no
        image that is the name that it would get beside another of its repository."""
        found = dict.fromkeys(references)
        found |= dict.fromkeys(self._aliases[each] for each in found if each in self._aliases)
        return list(dict.fromkeys(each if IMAGE_NAME.match(each) else self._name_of(each) for each in found))

    def _name_of(self, reference: str) -> str:
        image, parts = self._find(reference), IMAGE_REFERENCE.match(reference)
        if image is not None or parts is None:
            return reference if image is None else image.name
        suffix = parts["tag"] or (parts["digest"] or "").removeprefix("sha256:")[:12] or "latest"
        return f"{parts['name'].rpartition('/')[2]}-{suffix}"[:64]

    def _find(self, reference: str) -> Image | None:
        """Return the image of a name; or, for any other reference, of the images that have its tag or digest the one
        whose name stands before the colon, else the newest that came from that repository."""
        if IMAGE_NAME.match(reference):
            return self._read(reference)
        parts = IMAGE_REFERENCE.match(reference)
        if parts is None:
            return None
        try:
            asked = parse_reference(reference)
        except InvalidReference:  # a repository has no capitals, a name here may have some
            asked = None
        tag = asked.tag if asked is not None else parts["tag"]
        found = [image for image in self.images() if image.has(tag, parts["digest"])]
        own = [image for image in found if image.family == parts["name"]]
        pulled = [image for image in found if asked is not None and asked.is_of(image.origin)]
        by_name = sorted(own, key=lambda image: image.name != parts["name"])
        return next(iter(by_name or sorted(pulled, key=lambda image: image.created_at, reverse=True)), None)

    def _near(self, reference: str) -> str:
        """Return the end of a refusal that names the tags there are, and may be used, of what a reference may mean."""
        parts = IMAGE_REFERENCE.match(reference)
        name = "" if parts is None else parts["name"].rpartition("/")[2]
        found = [each for image in self.allowed() if image.family == name for each in image.references]
        return f"; there is {', '.join(found[:_MOST_NEAR])}" if found else ""

    def name_for(
        self, reference: Reference, name: str | None, *, under_way: Mapping[str, Reference] = MappingProxyType({})
    ) -> str:
        """Return the name of an image that is to be pulled: the given one, or that of the repository; beside an image
        of another tag or digest of the same repository that name and the tag, or digits of the digest. `under_way`:
        names of running pulls.

        Raises:
            InvalidReference: it would be no name.
            InvalidImage: the given name is none, or another image has the tag under that name.
        """
        if name is None:
            name = self._free_name(reference, under_way)
        check_name(name)
        family = reference.short_name if name == reference.second_name else name
        for each in self.images():
            if each.name != name and each.family == family and reference.tag in each.tags:
                raise InvalidImage(f"{family}:{reference.tag} is image {each.name!r}: give another name", image=name)
        return name

    def place_for(self, text: str) -> tuple[str, str, str]:
        """Return the name of an image that is to be made here as NAME or NAME:TAG, and the parts of the latter. A tag
        has the name of the image that owns it, if there is one; else NAME, or where that is taken NAME-TAG.

        Raises:
            InvalidImage: malformed, or NAME-TAG is another image.
        """
        parts = NEW_IMAGE.match(text)
        if parts is None or parts["tag"] is None:
            check_name(text)
            return text, "", ""
        name, tag = parts["name"], parts["tag"]
        owners = [each.name for each in self.images() if each.family == name and tag in each.tags]
        if owners:
            return name if name in owners else owners[0], name, tag
        chosen = name if self._read(name) is None else f"{name}-{tag}"
        check_name(chosen)
        self.require_free(chosen)
        return chosen, name, tag

    def require_free(self, name: str) -> None:
        """Refuse the name of an image that is there, before anything is loaded for another. Raises `InvalidImage`."""
        if self._read(name) is not None:
            raise InvalidImage(f"there is an image {name!r} already", image=name)

    def _free_name(self, reference: Reference, under_way: Mapping[str, Reference]) -> str:
        present = {each.name: each.origin for each in self.images() if each.family == reference.short_name}
        there = {**present, **under_way}
        for name, origin in there.items():
            if origin is not None and reference.is_same(origin) and name in (reference.name, reference.second_name):
                return name
        has_other = reference.is_of(there.get(reference.name))
        return reference.checked(reference.second_name) if has_other else reference.name

    def get_own(self, name: str) -> Image:
        """Return the image of a name or reference. Raises `InvalidImage`; for an alias the message names the image."""
        image = self.look_up(name)
        if self._find(name) is None:
            raise InvalidImage(f"{name!r} is an alias of image {image.name!r}; delete the image", image=name)
        return image

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names that lead to no image; `host`, which every start makes, counts as present."""
        return [each for each in names if not self._leads_somewhere(each)]

    def _leads_somewhere(self, name: str) -> bool:
        return any(each == HOST or self._find(each) is not None for each in (name, self._aliases.get(name, name)))

    def stamp(self, name: str) -> Stamp:
        """Return a value that changes whenever the answer of `get(name)` changes. No file is read."""
        target = self._aliases.get(name, "")
        if IMAGE_NAME.match(name) and (not target or IMAGE_NAME.match(target)):
            return self._stat(name), self._stat(target)
        try:
            names = [each for each in os.listdir(self._directory) if IMAGE_NAME.match(each)]
        except OSError:
            names = []
        return None, frozenset((each, self._stat(each)) for each in names)

    def _stat(self, name: str) -> tuple[int, int] | None:
        if not IMAGE_NAME.match(name):
            return None
        try:
            found = os.stat(self._directory / name / META)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def validate(self, name: str) -> list[str]:
        """Return the faults of an image's files, one sentence each; none means that the image can be used."""
        image = self.look_up(name)
        return rootfs.find_problems(*map(str, self.trees(image.name)), usr="/usr" if image.kind == "host" else None)

    def delete(self, name: str) -> bool:
        """Take an image that is no list of layers out of the store; return whether its files are gone. If not, they go
        at the next start without sessions.

        Raises:
            InvalidImage: there is no image of that name; for an alias the message names the image.
        """
        self._retire(self.get_own(name).name)
        return self.sweep()

    @contextlib.contextmanager
    def building(self, name: str) -> Iterator[Path]:
        """Open a directory to build an image in; leaving it without `publish` removes it."""
        if not IMAGE_NAME.match(name):
            raise InvalidImage("image name is malformed", image=name[:64])
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = self._directory / f"{_NEW}{secrets.token_hex(8)}"
        directory.mkdir(mode=0o700)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)  # keeps a sweep away; nsinit may hold a lock here, too
            (directory / "rootfs").mkdir()
            (directory / "rootfs").chmod(0o755)
            yield directory
        finally:
            os.close(fd)
            self._remove(directory)

    def publish(self, directory: Path, image: Image, *, replace: bool = False) -> Image:
        """Give a built directory its name.

        Raises:
            InvalidImage: the name is taken, and `replace` is not set.
        """
        (directory / META).write_text(json.dumps(attrs.asdict(image), indent=1) + "\n")
        self._share(directory)
        target = self._directory / image.name
        if replace:
            self._retire(image.name)
        try:
            directory.rename(target)
        except OSError as error:  # ENOTEMPTY, EEXIST: rename(2) replaces an empty directory only
            raise InvalidImage(f"there is an image {image.name!r} already", image=image.name) from error
        return image

    def sweep(self) -> bool:
        """Remove aborted builds and, unless a session exists, set-aside images; return whether the latter went."""
        has_sessions = self._sessions.is_dir() and any(self._sessions.iterdir())
        retired = [] if has_sessions else [*(self._directory / _RETIRED).glob("*")]
        for directory in [*retired, *self._directory.glob(f"{_NEW}*")]:
            if not _is_locked(directory):
                self._remove(directory)
        return not has_sessions

    def _share(self, directory: Path) -> None:
        """Give the store's group read access to this image's description."""
        store_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            share_image(store_fd, directory.name, os.fstat(store_fd).st_gid)
        finally:
            os.close(store_fd)

    def _retire(self, name: str) -> None:
        retired = self._directory / _RETIRED
        retired.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self._directory / name).rename(retired / f"{name}-{secrets.token_hex(8)}")

    def _remove(self, directory: Path) -> None:
        if not directory.exists():
            return
        parent_fd = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree(parent_fd, directory.name)
        finally:
            os.close(parent_fd)

    def _read(self, name: str) -> Image | None:
        try:
            fields = json.loads((self._directory / name / META).read_bytes())
            config = ImageConfig.from_stored(fields.pop("config", {}))
            image = Image(**fields | {"name": name, "config": config})
            return image if _is_sound(image) else None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # not always root has written it
            return None


def _is_sound(image: Image) -> bool:
    """Whether all fields are of their types: a daemon that was broken into may have written them."""
    texts = (image.created_at, image.source, image.fingerprint, image.digest, image.platform, image.repository)
    return (
        image.kind in ("host", "rootfs", "layers")
        and all(isinstance(each, str) for each in (*texts, *image.tags, *image.layers))
        and all(LAYER_DIGEST.fullmatch(each) for each in image.layers)
        and type(image.members) is type(image.size_bytes) is type(image.base_layers) is int
    )


def _is_locked(directory: Path) -> bool:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_before(created_at: str, moment: datetime) -> bool:
    """Whether a time of a description is before another; one that is none counts as old."""
    try:
        return datetime.fromisoformat(created_at) <= moment
    except (ValueError, TypeError):
        return True


def now() -> str:
    """Return the present time in the form of `Image.created_at`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# Access for the daemon's group


def share_store(images: Path, gid: int) -> None:
    """Make the directory of images if there is none, and let the group `gid` read it; 0: root alone.

    Raises:
        ConfigError: it is no directory of root's.
    """
    with contextlib.suppress(FileExistsError):
        images.mkdir(mode=0o700)
    try:
        store_fd = os.open(images, _DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{images} can't be used: {error.strerror}") from error
    try:
        if os.fstat(store_fd).st_uid != os.geteuid():
            raise ConfigError(f"{images} belongs to another user; check its content, and remove or chown it")
        _let_read(store_fd, gid)
        for name in filter(IMAGE_NAME.match, os.listdir(store_fd)):
            with contextlib.suppress(NotADirectoryError):
                share_image(store_fd, name, gid)
    finally:
        os.close(store_fd)


def share_image(store_fd: int, name: str, gid: int) -> None:
    """Let the group read one image's `meta.json`, if it has one."""
    image_fd = os.open(name, _DIRECTORY, dir_fd=store_fd)
    try:
        _let_read(image_fd, gid)
        with contextlib.suppress(FileNotFoundError):
            meta_fd = os.open(META, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=image_fd)
            try:
                if stat.S_ISREG(os.fstat(meta_fd).st_mode):
                    os.fchown(meta_fd, -1, gid)
                    os.fchmod(meta_fd, 0o640)
            finally:
                os.close(meta_fd)
    finally:
        os.close(image_fd)


def _let_read(directory_fd: int, gid: int) -> None:
    os.fchown(directory_fd, -1, gid)  # before the mode: the old group must not read
    os.fchmod(directory_fd, 0o750 if gid else 0o700)
