"""The directory that COPY takes files from: which files a source means, their digest, and an archive of them.

The directory may be a stranger's. A source leads nowhere but below it, through links as well, and a link within is
copied as a link. Files are read in pieces. The functions block: they are called in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandkasten.building.ignoring import Ignored, is_pattern, matches, parts_of
from sandkasten.sdk.archives import Digest, pack_files

_MAX_IGNORED_BYTES = 4 * 1024 * 1024
_DOCUMENT_MODE = 0o644


@dataclass(frozen=True)
class Source:
    """A file, or a directory whose content is meant: its path in the context, and where it is."""

    path: str
    place: Path
    is_directory: bool


@contextlib.contextmanager
def written(documents: Sequence[tuple[str, str]]) -> Iterator[list[Source]]:
    """Write here-documents, each a name and a content, to files that go when the block is left. Raises `OSError`."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-build-") as top:
        places = [Path(top, str(number)) for number in range(len(documents))]
        for (_, content), place in zip(documents, places, strict=True):
            place.write_text(content, "utf-8")
            place.chmod(_DOCUMENT_MODE)
        yield [Source(name, place, is_directory=False) for (name, _), place in zip(documents, places, strict=True)]


class BuildContext:
    """A directory, without what its `.dockerignore` names. `None`: there is none, and nothing can be copied."""

    def __init__(self, root: Path | None, ignored: Ignored | None = None) -> None:
        self._root = None if root is None else Path(os.path.realpath(root))
        self._ignored = Ignored() if ignored is None else ignored

    @classmethod
    def of(cls, root: Path, dockerfile: Path | None) -> BuildContext:
        """Return the context of a directory; patterns beside the Dockerfile (`NAME.dockerignore`) go before its own.

        Raises:
            OSError: the directory or the patterns can't be read.
            ValueError: the patterns are none.
        """
        os.listdir(root)
        places = [root / ".dockerignore"]
        if dockerfile is not None:
            places.insert(0, dockerfile.with_name(f"{dockerfile.name}.dockerignore"))
        for place in places:
            with contextlib.suppress(FileNotFoundError), place.open("rb") as file:
                content = file.read(_MAX_IGNORED_BYTES + 1)
                if len(content) > _MAX_IGNORED_BYTES:
                    raise ValueError(f"{place.name} is too large")
                return cls(root, Ignored(content))
        return cls(root)

    def find(self, source: str) -> list[Source]:
        """Return what a source of COPY means; of a pattern all that it fits, in the order of the names.

        Raises:
            ValueError: nothing is meant, or what is outside of the directory.
            OSError: a directory can't be read.
        """
        if self._root is None:
            raise ValueError("there is no directory to copy from")
        parts = parts_of(source)
        if ".." in parts:
            raise ValueError(f"{source!r} leads out of the directory that is built from")
        if not is_pattern(source):
            found = ["/".join(parts)]
        else:
            found = [path for path in self._walk("") if matches(parts, path.split("/"))]
        made = [self._source(path) for path in found if not path or not self._ignored(path)]
        if not made:
            raise ValueError(f"{source!r} is not in the directory that is built from, or is ignored there")
        return made

    def _source(self, path: str) -> Source:
        assert self._root is not None
        place = Path(os.path.realpath(self._root / path))
        if not place.is_relative_to(self._root):
            raise ValueError(f"{path!r} is a link out of the directory that is built from")
        if place != self._root and self._ignored(place.relative_to(self._root).as_posix()):
            raise ValueError(f"{path!r} is a link to what is ignored")
        try:
            mode = place.lstat().st_mode
        except OSError as error:
            raise ValueError(f"{path!r}: {(error.strerror or str(error)).lower()}") from None
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise ValueError(f"{path!r} is neither a file nor a directory")
        return Source(path, place, stat.S_ISDIR(mode))

    def _walk(self, top: str) -> Iterator[str]:
        """Yield the paths below a directory of the context, none that is ignored, each directory before its content."""
        pending = [self._entries(top)]
        while pending:
            if (found := next(pending[-1], None)) is None:
                pending.pop()
                continue
            path, is_directory = found
            is_left = self._ignored(path)
            if not is_left:
                yield path
            if is_directory and (not is_left or self._ignored.has_exceptions):
                pending.append(self._entries(path))

    def _entries(self, path: str) -> Iterator[tuple[str, bool]]:
        """Return the entries of a directory by their paths, in the order of their bytes, and which are directories."""
        assert self._root is not None
        with os.scandir(self._root / path) as entries:
            found = [(posixpath.join(path, each.name), each.is_dir(follow_symlinks=False)) for each in entries]
        return iter(sorted(found, key=lambda entry: os.fsencode(entry[0])))

    def pack(self, sources: Sequence[Source], name: str, mode: int | None, digest: Digest) -> Iterator[bytes]:
        """Yield an archive of what sources become below the destination; `name` is for a file that gets another one.
        `digest` gets names in the context, kinds, permissions and contents. Raises `OSError`."""

        def files() -> Iterator[tuple[str, Path]]:
            for path, place in self._files(sources):
                digest.update(os.fsencode(path) + b"\0")
                yield name or path, place

        return pack_files(files(), mode=mode, digest=digest)

    def digest(self, sources: Sequence[Source], mode: int | None) -> str:
        """Return the digest of what sources become. Raises `OSError`."""
        digest = hashlib.sha256()
        for _ in self.pack(sources, "", mode, digest):
            pass
        return digest.hexdigest()

    def _files(self, sources: Sequence[Source]) -> Iterator[tuple[str, Path]]:
        """Yield what sources become below the destination, by name, and where each is."""
        for source in sources:
            if not source.is_directory:
                yield posixpath.basename(source.path), source.place
                continue
            assert self._root is not None
            top = "" if source.place == self._root else source.place.relative_to(self._root).as_posix()
            for path in self._walk(top):
                yield (path.removeprefix(f"{top}/") if top else path), self._root / path
