"""Layers by digest, and images that are lists of them: drafts, names, which of them are in use, what may go.

A layer is `layers/<sha256>/{fs,meta.json,privileged,opaque,listing}`: `fs` has the files, with ids 0 to 65535;
`privileged` the names of files whose setuid or setgid bit was dropped, with their modes; `opaque` those of directories
with that mark, which no jail can read; `listing` what the unpacker made of each member (`wire/listing.py`).
A layer gets its name only when all of it is on the disk, and no other layer ever gets that name. An image is
`images/<name>/{layers,meta.json}`; `layers` is what counts here, `meta.json` is never read.

A layer is in use by an image that lists it and by a session whose record (`run/<session>/image`) does. A collection
looks at all of them, and moves what nobody uses out of the way, with the store locked against every process that
begins a use: one that writes a record, publishes an image, or finds a layer that it does not have to unpack.
Sources: flock(2); rename(2) RENAME_NOREPLACE, RENAME_EXCHANGE; syncfs(2); fsync(2) on directories; openat2(2);
Documentation/filesystems/overlayfs.rst (trusted.overlay.opaque).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from nsinit.scheduler import Wait
from nsinit.steps import Crash, StepFailed, passing
from nsinit.storage.chores import Chore, run_chore
from nsinit.storage.paths import DIGEST_PREFIX, Layout, check_owner_of, make_directory, sync_directory
from nsinit.storage.trash import remove_tree
from nsinit.wire import listing
from nsinit.wire.protocol import (
    MAX_DESCRIPTION_BYTES,
    CollectLayers,
    DeleteImage,
    LayersCollected,
    LayerUnpacked,
    PublishImage,
)
from nsinit.wire.validate import is_digest, is_session_id
from nsinit.wire.verdict import Unpacked

DRAFT, IMAGE_DRAFT = "+new-", ".new-"
"""The beginnings of the names of drafts. No layer and no image has such a name."""
OPAQUE = "trusted.overlay.opaque"
_RETIRED = ".retired"
_TRASH = "layer-"
_UNFINISHED = ".new"
_META, _PRIVILEGED, _OPAQUE, _LIST = "meta.json", "privileged", "opaque", "layers"
_VERSION = 1
_COUNTS = ("entries", "size_bytes", "skipped", "privileged")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BENEATH = k.RESOLVE_BENEATH | k.RESOLVE_NO_SYMLINKS | k.RESOLVE_NO_XDEV
_MAX_LIST_BYTES = 64 * 1024
_CHORE_S = 600.0
"""Seconds that a disk may take for all that was unpacked."""
STAGE = "layer"
IMAGE_STAGE = "image"


@dataclass(frozen=True, slots=True)
class Draft:
    """A layer in the making. `fd`: its directory, locked so that no sweep takes it; `files_fd`: that of its files;
    `listing_fd`: the file that lists them."""

    name: str
    fd: int
    files_fd: int
    listing_fd: int

    def close(self) -> None:
        os.close(self.listing_fd)
        os.close(self.files_fd)
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class LayerDirectory:
    """The layers and images of one data directory."""

    layout: Layout
    crash: Crash | None = None

    # Layers

    def share(self) -> None:
        """Let the daemon's group read what layers are and which there are, and remove drafts that nobody works on."""
        gid = os.stat(self.layout.layers).st_gid
        for name in os.listdir(self.layout.layers):
            path = f"{self.layout.layers}/{name}"
            with contextlib.suppress(FileNotFoundError):  # another nsinit has removed it meanwhile
                if name.startswith(DRAFT):
                    self._sweep(path)
                elif os.lstat(path).st_gid != gid:
                    _share(path, gid)

    def find(self, digest: str) -> LayerUnpacked | None:
        """Return the layer of that digest, if there is one, and note that it was asked for. Raises `StepFailed`: its
        description is damaged."""
        with self._shared():
            try:
                entries, size_bytes, skipped, privileged = _read_counts(self.layout.layer(digest))
                os.utime(self.layout.layer(digest))
            except FileNotFoundError:
                return None
        return LayerUnpacked(0, digest, entries, size_bytes, skipped, privileged, is_new=False)

    @contextlib.contextmanager
    def open_files(self, name: str) -> Iterator[tuple[int, int, int]]:
        """Open a layer's directory of files and its lists, of privileged files and of opaque directories, and note that
        it was asked for. An image that is no list of layers has files alone: both lists are empty. Raises
        `FileNotFoundError`: there is none, or one of a version that kept no such lists."""
        with contextlib.ExitStack() as opened:

            def open_in(path: str, flags: int, dir_fd: int | None = None) -> int:
                fd = os.open(path, flags, dir_fd=dir_fd)
                opened.callback(os.close, fd)
                return fd

            if not is_digest(name):
                files_fd = open_in(self.layout.image_rootfs(name), _DIRECTORY)
                empty_fd, end = os.pipe2(os.O_CLOEXEC)
                os.close(end)
                opened.callback(os.close, empty_fd)
                yield files_fd, empty_fd, empty_fd
                return
            with self._shared():
                fd = open_in(self.layout.layer(name), _DIRECTORY)
                os.utime(fd)
                files_fd = open_in("fs", _DIRECTORY, fd)
                privileged_fd, opaque_fd = open_in(_PRIVILEGED, _READ, fd), open_in(_OPAQUE, _READ, fd)
            yield files_fd, privileged_fd, opaque_fd

    def make_draft(self) -> Draft:
        """Make a draft with no files. Raises `OSError`."""
        name = f"{DRAFT}{os.urandom(8).hex()}"
        path = f"{self.layout.layers}/{name}"
        with self._shared():
            os.mkdir(path, 0o700)
            fd = os.open(path, _DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.mkdir("fs", 0o700, dir_fd=fd)
        passing(self.crash, "nsinit.layer.drafted")
        return Draft(name, fd, os.open("fs", _DIRECTORY, dir_fd=fd), os.open(listing.NAME, _NEW, 0o600, dir_fd=fd))

    def keep(self, draft: Draft, unpacked: Unpacked) -> Chore:
        """Give a draft its name, once all of it is on the disk; it stays a draft if there is such a layer by now.

        Raises:
            StepFailed: the disk is full, or a directory that the archive called opaque is none of the layer's.
        """
        digest, layout = DIGEST_PREFIX + unpacked.digest, self.layout

        def keep() -> None:
            for path in unpacked.opaque:
                fd = syscalls.openat2(draft.files_fd, path, _DIRECTORY, resolve=_BENEATH)
                os.setxattr(fd, OPAQUE, b"y")
                os.close(fd)
            # Whatever the unpacker did to the top: it is closed as it was made. An overlay shows its upper directory's.
            os.fchown(draft.files_fd, 0, 0)
            os.fchmod(draft.files_fd, 0o700)
            os.fchown(draft.listing_fd, 0, 0)  # the jail might have made a setuid program of it
            os.fchmod(draft.listing_fd, 0o600)
            gid = os.stat(layout.layers).st_gid
            said = {"version": _VERSION, **unpacked.counts._asdict(), "privileged": len(unpacked.privileged)}
            said |= {"opaque": len(unpacked.opaque), "created_at": int(time.time())}
            _write(draft.fd, _META, json.dumps(said).encode())
            for name, listed in ((_PRIVILEGED, unpacked.privileged), (_OPAQUE, unpacked.opaque)):
                _write(draft.fd, name, b"".join(each + b"\0" for each in listed))
            _share(f"{layout.layers}/{draft.name}", gid)
            syscalls.syncfs(draft.fd)
            with self._shared():
                try:
                    syscalls.renameat2(f"{layout.layers}/{draft.name}", layout.layer(digest), k.RENAME_NOREPLACE)
                except FileExistsError:
                    os.utime(layout.layer(digest))
            sync_directory(layout.layers)

        yield from run_chore(
            STAGE, layout.layer(digest), keep, frozenset({draft.fd, draft.files_fd, draft.listing_fd}), most_s=_CHORE_S
        )
        passing(self.crash, "nsinit.layer.named")

    def discard(self, draft: Draft) -> Chore:
        """Remove a draft, if it has not become a layer. Raises `StepFailed`."""
        path = f"{self.layout.layers}/{draft.name}"
        if os.path.lexists(path):
            yield from self._remove(path)

    def empty_trash(self) -> Chore:
        """Remove what an earlier removal of layers has left. What can't be removed stays."""
        for name in os.listdir(self.layout.trash):
            if name.startswith(_TRASH):
                with contextlib.suppress(StepFailed):
                    yield from self._remove(f"{self.layout.trash}/{name}")

    # Images

    def publish(self, request: PublishImage, description_fd: int) -> Chore:
        """Give layers and a description a name; see `PublishImage`. Raises `StepFailed`, `OSError`."""
        layout, draft = self.layout, f"{self.layout.images}/{IMAGE_DRAFT}{os.urandom(8).hex()}"
        description = os.pread(description_fd, MAX_DESCRIPTION_BYTES + 1, 0)
        if not 0 < len(description) <= MAX_DESCRIPTION_BYTES:
            raise OSError(errno.EFBIG, f"an image's description has up to {MAX_DESCRIPTION_BYTES} bytes")
        path, text = layout.image(request.name), "".join(f"{each}\n" for each in request.layers)
        images_fd = os.open(layout.images, _DIRECTORY)

        def publish() -> None:
            gid = os.fstat(images_fd).st_gid
            os.mkdir(draft, 0o700)
            fd = os.open(draft, _DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_SH)
            try:
                _write(fd, _LIST, text.encode())
                _write(fd, _META, description)
                _share(draft, gid)
                os.fsync(fd)
                # Only now, since the loop of another nsinit waits where it wants the store for itself.
                with self._shared():
                    if not all(os.path.isdir(layout.layer_files(each)) for each in request.layers):
                        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
                    self._name(draft, path, replace=request.replace)
            except OSError:
                remove_tree(images_fd, os.path.basename(draft))
                raise
            os.fsync(images_fd)

        try:
            yield from run_chore(IMAGE_STAGE, path, publish, frozenset({images_fd}))
        finally:
            os.close(images_fd)
        passing(self.crash, "nsinit.image.published")

    def _name(self, draft: str, path: str, *, replace: bool) -> None:
        """Give an image its name; the one that had it goes where no look-up leads: sessions may have its files."""
        if replace and os.path.lexists(path):
            # RENAME_EXCHANGE: at no moment is there no image of that name.
            syscalls.renameat2(draft, path, k.RENAME_EXCHANGE)
            self._retire(draft, os.path.basename(path))
        else:
            syscalls.renameat2(draft, path, k.RENAME_NOREPLACE)

    def _retire(self, path: str, name: str) -> str:
        retired = f"{self.layout.images}/{_RETIRED}"
        make_directory(retired)
        target = f"{retired}/{name}-{os.urandom(8).hex()}"
        os.rename(path, target)
        return target

    def delete(self, request: DeleteImage) -> Chore:
        """Delete an image; see `DeleteImage`. Raises `StepFailed`, `OSError`."""
        path = self.layout.image(request.name)
        with self._locked():
            if not os.path.isdir(path):
                raise StepFailed(IMAGE_STAGE, "there is no such image", errno=errno.ENOENT)
            if any(name == request.name for name, _ in self._uses()):
                raise StepFailed(IMAGE_STAGE, "a session has it", errno=errno.EBUSY)
            has_layers = os.path.lexists(self.layout.image_layers(request.name))
            path = self._retire(path, request.name)
        passing(self.crash, "nsinit.image.retired")
        if has_layers:  # the files of others may be the lower layer of a session
            yield from self._remove(path)
        else:
            yield from run_chore(IMAGE_STAGE, path, partial(sync_directory, self.layout.images))

    def layers_of(self, name: str) -> tuple[str, ...]:
        """Return the layers of an image. Raises `FileNotFoundError`, and `StepFailed` where the list is no list."""
        path = self.layout.image_layers(name)
        return _checked_list(_read_lines(path), path)

    # Uses

    def note_use(self, session_id: str, name: str, digests: Iterable[str]) -> None:
        """Record what a session has, before it has it. Raises `OSError`."""
        text = "".join(f"{each}\n" for each in (name, *digests))
        path = self.layout.session_use(session_id)
        if os.path.lexists(path):  # noted when the image was mounted ahead
            return
        with open(os.open(f"{path}{_UNFINISHED}", _NEW & ~os.O_EXCL | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text.encode())
        # Whole or not at all, when nsinit is killed. No fsync(2): the loop would wait for the disk, and after a loss of
        # power there is no session that has anything; a start removes what they left.
        with self._shared():
            os.rename(f"{path}{_UNFINISHED}", path)

    def _uses(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the image and the layers of each session that has some. Raises `OSError`, `StepFailed`: unknown."""
        if not os.path.lexists(self.layout.run):
            return  # nobody has ever started here what makes sessions
        for session_id in os.listdir(self.layout.run):
            if is_session_id(session_id):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    yield self.use_of(session_id)

    def use_of(self, session_id: str) -> tuple[str, tuple[str, ...]]:
        """Return the image and the layers of a session. Raises `FileNotFoundError`: its image is no list of layers;
        `OSError`, `StepFailed`: unknown."""
        path = self.layout.session_use(session_id)
        lines = _read_lines(path)
        return "".join(lines[:1]), _checked_list(lines[1:], path)

    def collect(self, request: CollectLayers) -> Generator[Wait, bool, LayersCollected]:
        """Delete the layers that nobody has; see `CollectLayers`. Raises `OSError`, `StepFailed`: it is not known which
        those are, and none was deleted."""
        layout, before = self.layout, time.time() - request.grace_s
        with self._locked():
            used = {each for _, digests in self._uses() for each in digests} | set(request.kept)
            for name in os.listdir(layout.images):
                if not name.startswith(IMAGE_DRAFT):  # a draft asks for its layers once more before it has a name
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        used.update(self.layers_of(name))
            found = [DIGEST_PREFIX + name for name in os.listdir(layout.layers)]
            unused = [layout.layer(each) for each in request.only or found if is_digest(each) and each not in used]
            targets = {
                path: f"{layout.trash}/{_TRASH}{os.urandom(8).hex()}"
                for path in unused
                if os.path.isdir(path) and os.stat(path).st_mtime <= before
            }
            freed_bytes = sum(_read_counts(path)[1] for path in targets)  # all are read before the first is moved
            moved = {} if request.dry_run else targets
            for path, target in moved.items():
                os.rename(path, target)
        passing(self.crash, "nsinit.layer.collected")
        for target in moved.values():
            yield from self._remove(target)
        return LayersCollected(request.seq, len(targets), freed_bytes)

    # Within

    @contextlib.contextmanager
    def _shared(self, operation: int = fcntl.LOCK_SH) -> Iterator[None]:
        """Keep collections away for a moment."""
        fd = os.open(self.layout.layers, _DIRECTORY)
        try:
            fcntl.flock(fd, operation)
            yield
        finally:
            os.close(fd)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep every beginning of a use away for a moment."""
        return self._shared(fcntl.LOCK_EX)

    def _sweep(self, path: str) -> None:
        """Move a draft that nobody works on into the trash."""
        with self._locked():
            fd = os.open(path, _DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                check_owner_of(fd, path)
                os.rename(path, f"{self.layout.trash}/{_TRASH}{os.urandom(8).hex()}")
            except BlockingIOError:
                pass
            finally:
                os.close(fd)

    def _remove(self, path: str) -> Chore:
        """Remove a directory, first from its place. Raises `StepFailed`."""
        trash = path
        if os.path.dirname(path) != self.layout.trash:
            trash = f"{self.layout.trash}/{_TRASH}{os.urandom(8).hex()}"
            os.rename(path, trash)
        trash_fd = os.open(self.layout.trash, _DIRECTORY)

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):  # somebody else is at the trash, too
                remove_tree(trash_fd, os.path.basename(trash))
            sync_directory(os.path.dirname(path))

        try:
            yield from run_chore(STAGE, path, remove, frozenset({trash_fd}), most_s=_CHORE_S)
        finally:
            os.close(trash_fd)


def _share(path: str, gid: int) -> None:
    """Let the group read a layer's or an image's description, and pass to no file of it."""
    for each, mode in ((f"{path}/{_META}", 0o640), (path, 0o750 if gid else 0o700)):
        os.chown(each, 0, gid, follow_symlinks=False)
        os.chmod(each, mode)


def _write(dir_fd: int, name: str, content: bytes) -> None:
    with open(os.open(name, _NEW, 0o600, dir_fd=dir_fd), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read_counts(path: str) -> list[int]:
    """Return what the description of the layer in `path` counts, as `_COUNTS` names it. Raises `OSError`, `StepFailed`:
    the description is damaged."""
    with open(f"{path}/{_META}", "rb") as file:
        content = file.read(_MAX_LIST_BYTES)
    try:
        said = json.loads(content)
        return [int(said[name]) for name in _COUNTS]
    except (ValueError, KeyError, TypeError):
        raise StepFailed(STAGE, "the description of the layer is damaged", path=path, errno=errno.EUCLEAN) from None


def _read_lines(path: str) -> list[str]:
    """Return the words of a list or a record. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(fd, _MAX_LIST_BYTES).decode("ascii", "replace").split()
    finally:
        os.close(fd)


def _checked_list(digests: list[str], path: str) -> tuple[str, ...]:
    if not digests or not all(map(is_digest, digests)):
        raise StepFailed(IMAGE_STAGE, "the list of layers is none", path=path, errno=errno.EUCLEAN)
    return tuple(digests)
