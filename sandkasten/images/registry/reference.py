"""References of images, as users write them: `debian`, `ghcr.io/owner/image:tag`, `host:5000/image@sha256:...`.

The grammar is that of the distribution project's package `reference`: a first component with a dot or a colon, or
`localhost`, is a registry, and everything else is in Docker Hub, one name alone in its `library/`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

import attrs

from sandkasten.errors import InvalidReference
from sandkasten.model import IMAGE_NAME

HUB: Final = "docker.io"
_HUB_ALIASES = ("index.docker.io", "registry-1.docker.io", "registry.hub.docker.com")
_LATEST = "latest"
_DIGITS = 12
_MAX_NAME_CHARS = 255
_MAX_SHOWN_CHARS = 100

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:(?P<v6>\[[0-9A-Fa-f:.]+\])|{_LABEL}(?:\.{_LABEL})*)(?::(?P<port>[0-9]{{1,5}}))?\Z")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")


@attrs.frozen
class Reference:
    """An image in a registry, with a tag, a digest, or both: then the digest counts, and the tag is a name for it."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"

    @property
    def target(self) -> str:
        """Digest or tag that the registry is asked for."""
        return self.digest or self.tag or _LATEST

    @property
    def short_name(self) -> str:
        """The last part of the repository."""
        return self.repository.rpartition("/")[2]

    @property
    def second_name(self) -> str:
        """The name of the image beside one of the same repository with another tag."""
        return f"{self.short_name}-{self.tag or (self.digest or '').removeprefix('sha256:')[:_DIGITS]}"

    @property
    def name(self) -> str:
        """The name that the image gets in this node's store, if the caller gives none, and no other image has it.

        Raises:
            InvalidReference: the last part of the repository is no name of an image here.
        """
        return self.checked(self.short_name)

    def checked(self, name: str) -> str:
        """Return a name for the image of this reference. Raises `InvalidReference`: it is none."""
        if not IMAGE_NAME.match(name):
            raise InvalidReference(f"{name!r} is no name for an image here; give one", reference=str(self))
        return name

    def is_of(self, other: Reference | None) -> bool:
        """Whether both are of one repository."""
        return other is not None and (self.registry, self.repository) == (other.registry, other.repository)

    def is_same(self, other: Reference) -> bool:
        """Whether both have one name: the same tag of one repository, or no tag and the same digest."""
        own, others = (each.tag or each.digest for each in (self, other))
        return self.is_of(other) and own == others


def parse_reference(text: str) -> Reference:
    """Take a reference apart.

    Raises:
        InvalidReference: the message says which part is at fault.
    """
    if "://" in text:
        raise _bad(text, "a reference has no scheme: leave out what is before `//`, and the `//`")
    if not text or len(text) > _MAX_NAME_CHARS + 256 or not text.isascii() or not text.isprintable() or " " in text:
        raise _bad(text, "a reference is 1 to 255 visible ASCII characters, besides tag and digest")
    rest, at, digest = text.partition("@")
    if at and not DIGEST.match(digest):
        raise _bad(text, "the digest must be `sha256:` and 64 hexadecimal digits in lower case")
    name, tag = rest, ""
    if ":" in rest.rpartition("/")[2] and not rest.endswith("]"):
        name, _, tag = rest.rpartition(":")
        if not _TAG.match(tag):
            raise _bad(text, "a tag is 1 to 128 of A-Z, a-z, 0-9, '_', '.', '-', and begins with none of '.', '-'")
    first, slash, others = name.partition("/")
    if slash and (set(".:[") & set(first) or first == "localhost" or first != first.lower()):
        registry, repository = _registry(text, first), others
    else:
        registry, repository = HUB, name
    if registry == HUB and "/" not in repository:
        repository = f"library/{repository}"
    if not _REPOSITORY.match(repository) or len(registry) + len(repository) >= _MAX_NAME_CHARS:
        raise _bad(
            text, "a repository is names of a-z, 0-9 with single '.', '_' or '-' between, parted by '/', 255 at most"
        )
    return Reference(registry, repository, tag or (None if digest else _LATEST), digest or None)


def _registry(text: str, host: str) -> str:
    match = _HOST.match(host)
    if match is None or (match["port"] and not 1 <= int(match["port"]) <= 65535):
        raise _bad(text, "the registry must be HOST or HOST:PORT")
    if match["v6"]:
        try:
            ipaddress.IPv6Address(match["v6"][1:-1])
        except ValueError:
            raise _bad(text, "the registry is no IPv6 address") from None
    host = host.lower()
    return HUB if host in _HUB_ALIASES else host


def _bad(text: str, problem: str) -> InvalidReference:
    shown = text[:_MAX_SHOWN_CHARS].encode("ascii", "backslashreplace").decode("ascii")
    return InvalidReference(f"{shown!r} is no reference of an image: {problem}")
