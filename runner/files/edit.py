"""Edits of text files, all of them or none: replace, insert, create, delete, patch. Work of a file worker; may block.

All results are computed, then all are written beside their targets, and only then do they take their places, each in
one step. An error on the way puts the old files back; a kill on the way leaves each file old or new, and whole.
Content is bytes throughout: nothing but the edited part of a file changes.

Sources: link(2), rename(2), access(2).
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import unified_diff
from io import RawIOBase
from typing import Any, Literal

from runner.files.contents import (
    check_writable,
    held,
    is_one_of,
    open_new,
    open_part,
    put_in_place,
    sync_name,
    temporary_name,
)
from runner.files.paths import FileTarget, Resolver, refusal, status_of
from runner.files.tree import READ, Check, etag_of
from runner.loop.context import Refused
from runner.wire.protocol import MAX_EDITS, MAX_FRAME_BYTES, Edited, EditedFile, EditFiles, GetFile, Unedited

MAX_EDIT_BYTES = 16 * 1024 * 1024
"""Most bytes of the request, and of all files before their edits and after each."""
_MAX_DIFF_LINES = 5000
_DIFFS_BYTES = 128 * 1024
"""Most bytes of all diffs of an answer, as JSON."""
_MAX_LINES_TOLD = 100
_FUZZ_LINES = 3
_HEADER = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_Edit = Mapping[str, Any]  # JSON values
_Reason = Literal["ambiguous", "absent", "version"]


class _CannotBeMade(Exception):
    """An edit does not fit its file."""

    def __init__(self, reason: _Reason, lines: tuple[int, ...] = (), etag: str = "") -> None:
        super().__init__(reason)
        self.reason, self.lines, self.etag = reason, lines[:_MAX_LINES_TOLD], etag


@dataclass(slots=True)
class _Draft:
    """A file that is edited: its content before and after, None for no file, and what is needed to put it in place or
    back. Descriptors are the draft's own."""

    path: str
    encoded: bytes
    before: bytes | None
    etag: str
    after: bytes | None = None
    target: FileTarget | None = None
    fd: int = -1
    temporary: bytes = b""
    spare: bytes = b""
    offsets: list[int] = field(default_factory=list)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        if self.target is not None:
            os.close(self.target.directory_fd)


def edit(request: EditFiles, resolver: Resolver, source: RawIOBase, check: Check) -> Edited | Unedited:
    """Make the edits that come as a JSON list, or none of them.

    Raises:
        Refused, OSError
    """
    edits = _read(source)
    drafts: dict[bytes, _Draft] = {}
    results: list[EditedFile] = []
    changed: list[_Draft] = []
    room = _DIFFS_BYTES
    try:
        for number, each in enumerate(edits):
            check()
            draft = _draft_of(each["path"], resolver, drafts)
            earlier = draft.after
            draft.offsets = []
            try:
                if "if_match" in each and not (draft.etag and is_one_of(draft.etag, (each["if_match"],))):
                    raise _CannotBeMade("version", etag=draft.etag)
                count = _OPERATIONS[each["op"]](each, draft)
            except _CannotBeMade as problem:
                return Unedited(number, problem.reason, problem.lines, problem.etag)
            if sum(len(one.before or b"") + len(one.after or b"") for one in drafts.values()) > MAX_EDIT_BYTES:
                raise Refused("TOO_LARGE", f"the files of all edits have more than {MAX_EDIT_BYTES} bytes")
            diff = _diff(each["path"], earlier, draft.after)
            if diff is not None and (room := room - len(json.dumps(diff))) < 0:
                diff, room = None, 0
            results.append(EditedFile("", count, diff, tuple(draft.offsets)))
            changed.append(draft)
        wanted = [each for each in drafts.values() if each.after != each.before]
        if request.dry_run:
            for draft in wanted:
                _check_place(draft, resolver)
            return Edited(tuple(results))
        _put_all(wanted, resolver, check, syncs=request.sync)
        etags = {id(each): _etag_now(each, resolver) for each in drafts.values()}
        return Edited(
            tuple(
                EditedFile(etags[id(draft)], each.replacements, each.diff, each.offsets)
                for each, draft in zip(results, changed, strict=True)
            )
        )
    finally:
        for draft in drafts.values():
            draft.close()


def _read(source: RawIOBase) -> list[_Edit]:
    content = bytearray()
    while chunk := source.read(MAX_FRAME_BYTES):
        content += chunk
        if len(content) > MAX_EDIT_BYTES:
            raise Refused("TOO_LARGE", f"the edits have more than {MAX_EDIT_BYTES} bytes")
    edits: list[_Edit] = json.loads(content)
    if not 0 < len(edits) <= MAX_EDITS:
        raise Refused("BAD_REQUEST", f"there must be 1 to {MAX_EDITS} edits")
    return edits


# Content --------------------------------------------------------------------------------------------------------------


def _draft_of(path: str, resolver: Resolver, drafts: dict[bytes, _Draft]) -> _Draft:
    """Return the draft of a file, whatever name it is edited by."""
    try:
        fd, part = open_part(GetFile(path), resolver)
    except Refused as refused:
        if refused.error.code != "FILE_NOT_FOUND":
            raise
        encoded = _place_of_new(path, resolver)
        return drafts.setdefault(encoded, _Draft(path, encoded, None, ""))
    with open(fd, "rb") as file:
        real = os.fsencode(part.path)
        if real not in drafts:
            if part.size_bytes > MAX_EDIT_BYTES:
                raise Refused("TOO_LARGE", f"a file of more than {MAX_EDIT_BYTES} bytes: {path[:200]}")
            before = file.read(MAX_EDIT_BYTES + 1)
            drafts[real] = _Draft(path, real, before, part.etag, before)
    return drafts[real]


def _place_of_new(path: str, resolver: Resolver) -> bytes:
    """Return the one path of a file that is not there, whatever directories and links lead to it."""
    directory, name = os.path.split(resolver.encode(path))
    if name in (b"", b".", b".."):
        raise Refused("IS_DIRECTORY", f"the path names a directory: {path[:200]}")
    fd, real, missing = _part_that_exists(directory, path, resolver)
    os.close(fd)
    return os.path.join(real, *missing, name)


def _part_that_exists(directory: bytes, path: str, resolver: Resolver) -> tuple[int, bytes, list[bytes]]:
    """Return an O_PATH descriptor (the caller's) of the part of a path that is there, its real path, and the names of
    the rest: nothing of that is a link which leads anywhere."""
    missing: list[bytes] = []
    while True:
        try:
            return *resolver.open_existing(directory or b"/"), missing
        except FileNotFoundError:
            directory, _, name = directory.rpartition(b"/")
            missing = [name, *missing] if name not in (b"", b".") else missing
        except OSError as error:
            raise refusal(error, path) from None


def _text_of(draft: _Draft) -> bytes:
    if draft.after is None:
        raise Refused("FILE_NOT_FOUND", f"no such file or directory: {draft.path[:200]}")
    return draft.after


def _replace(wanted: _Edit, draft: _Draft) -> int:
    text, old, new = _text_of(draft), wanted["old"].encode(), wanted["new"].encode()
    places = list(_places_of(old, text))
    if not places:
        raise _CannotBeMade("absent")
    if wanted.get("count", 1) != "all":
        if len(places) > 1:
            raise _CannotBeMade("ambiguous", tuple(text.count(b"\n", 0, place) + 1 for place in places))
        draft.after = text[: places[0]] + new + text[places[0] + len(old) :]
        return 1
    count = text.count(old)
    if len(text) + count * (len(new) - len(old)) > MAX_EDIT_BYTES:
        raise Refused("TOO_LARGE", f"a file would have more than {MAX_EDIT_BYTES} bytes: {draft.path[:200]}")
    draft.after = text.replace(old, new)
    return count


def _places_of(old: bytes, text: bytes) -> Iterator[int]:
    """Yield the first places of a text, overlapping ones too."""
    place = text.find(old)
    for _ in range(_MAX_LINES_TOLD):
        if place < 0:
            return
        yield place
        place = text.find(old, place + 1)


def _insert(wanted: _Edit, draft: _Draft) -> int:
    lines, new = _lines(_text_of(draft)), _ended(wanted["text"].encode())
    line = wanted["line"]
    if line > len(lines):
        raise _CannotBeMade("absent")
    if 0 < line == len(lines):
        lines[-1] = _ended(lines[-1])
    draft.after = b"".join((*lines[:line], new, *lines[line:]))
    return 1


def _create(wanted: _Edit, draft: _Draft) -> int:
    if draft.after is not None:
        raise Refused("EXISTS", f"there is such a file already: {draft.path[:200]}")
    draft.after = wanted["text"].encode()
    return 1


def _delete(_wanted: _Edit, draft: _Draft) -> int:
    _text_of(draft)
    draft.after = None
    return 1


def _lines(text: bytes) -> list[bytes]:
    return list(re.findall(rb"[^\n]*\n|[^\n]+", text))


def _ended(line: bytes) -> bytes:
    return line if not line or line.endswith(b"\n") else line + b"\n"


# Patches --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Hunk:
    """Lines that take the place of others. `at`: index of the first one, None if the patch has no numbers; `behind`:
    a line that comes before."""

    at: int | None
    behind: bytes = b""
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


def _patch(wanted: _Edit, draft: _Draft) -> int:
    text, hunks = _text_of(draft), _hunks(wanted["patch"].encode())
    lines = _lines(text)
    # Patches without numbers have no way to say that the last line has no end.
    is_unended = hunks[0].at is None and bool(lines) and not lines[-1].endswith(b"\n")
    if is_unended:
        lines[-1] += b"\n"
    made: list[bytes] = []
    done = 0
    for hunk in hunks:
        place = _place(hunk, lines, done)
        if hunk.at is not None:
            draft.offsets.append(place - hunk.at)
        made += lines[done:place] + hunk.new
        done = place + len(hunk.old)
    draft.after = b"".join(made + lines[done:])
    if is_unended:
        draft.after = draft.after.removesuffix(b"\n")
    return len(hunks)


def _place(hunk: _Hunk, lines: list[bytes], first: int) -> int:
    """Return the index of the one place, from `first` on, that a hunk fits."""

    def fits(place: int) -> bool:
        return first <= place <= len(lines) and lines[place : place + len(hunk.old)] == hunk.old

    if hunk.at is not None:
        for distance in range(_FUZZ_LINES + 1 if hunk.old else 1):
            places = [each for each in sorted({hunk.at - distance, hunk.at + distance}) if fits(each)]
            if places:
                break
    else:
        if hunk.behind:
            named = (number for number in range(first, len(lines)) if lines[number].strip() == hunk.behind)
            first = next(named, len(lines)) + 1
        places = [each for each in range(first, len(lines) - len(hunk.old) + 1) if hunk.old and fits(each)]
    if not places:
        raise _CannotBeMade("absent")
    if len(places) > 1:
        raise _CannotBeMade("ambiguous", tuple(each + 1 for each in places))
    return places[0]


def _hunks(patch: bytes) -> list[_Hunk]:
    """Return the hunks of a unified diff, or of the form that begins with `*** Begin Patch`, for one file.

    Raises:
        Refused
    """
    hunks: list[_Hunk] = []
    files = olds = news = 0  # lines that the hunk still has, in a diff with numbers
    is_numbered, last_sign = False, b""
    for line in patch.removesuffix(b"\n").split(b"\n"):
        sign, rest = line[:1], line[1:] + b"\n"
        is_inside = bool(hunks) and (not is_numbered or olds > 0 or news > 0)
        if line.startswith(b"@@") and not (is_numbered and is_inside):
            found = _HEADER.match(line)
            is_numbered = found is not None
            if found is not None:
                olds, news = (int(each or b"1") for each in found.group(2, 4))
                hunks.append(_Hunk(int(found[1]) - (olds > 0)))
            else:
                hunks.append(_Hunk(None, line[2:].strip()))
        elif line.startswith(b"*** ") and not (is_numbered and is_inside):
            files += line.startswith((b"*** Update File:", b"*** Add File:", b"*** Delete File:"))
            if line.startswith((b"*** Add File:", b"*** Delete File:", b"*** Move to:")):
                raise Refused("BAD_REQUEST", "a patch changes one file; create and delete are edits of their own")
        elif hunks and sign == b"\\":
            for each in _ends_of(hunks[-1], last_sign):
                each[-1] = each[-1].removesuffix(b"\n")
        elif is_inside and sign in (b" ", b"-", b"+", b""):
            olds, news = olds - (sign != b"+"), news - (sign != b"-")
            if sign != b"+":
                hunks[-1].old.append(rest)
            if sign != b"-":
                hunks[-1].new.append(rest)
            last_sign = sign
        elif is_inside:
            raise Refused("BAD_REQUEST", "a line of the patch begins with none of ' ', '-', '+', '@@'")
        else:
            files += line.startswith(b"--- ")
    if not hunks or files > 1 or (is_numbered and (olds or news)):
        raise Refused("BAD_REQUEST", "not a whole patch of one file")
    if len({each.at is None for each in hunks}) > 1:
        raise Refused("BAD_REQUEST", "a patch has line numbers everywhere or nowhere")
    return hunks


def _ends_of(hunk: _Hunk, sign: bytes) -> list[list[bytes]]:
    """Return the sides of a hunk whose last line is the line before."""
    sides = ([] if sign == b"+" else [hunk.old]) + ([] if sign == b"-" else [hunk.new])
    return [each for each in sides if each]


def _diff(path: str, before: bytes | None, after: bytes | None) -> str | None:
    """Return a unified diff; None for files that are no text, or too long to be compared."""
    old, new = _lines(before or b""), _lines(after or b"")
    if b"\0" in (before or b"") + (after or b"") or len(old) + len(new) > _MAX_DIFF_LINES:
        return None
    a, b = ([line.decode("utf-8", "replace") for line in lines] for lines in (old, new))
    named = path.encode("utf-8", "replace").decode("utf-8")
    found = unified_diff(a, b, fromfile=named if before is not None else "/dev/null", tofile=named, n=3)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found)


_OPERATIONS: Mapping[str, Callable[[_Edit, _Draft], int]] = {
    "replace": _replace,
    "insert": _insert,
    "create": _create,
    "delete": _delete,
    "patch": _patch,
}


# Places ---------------------------------------------------------------------------------------------------------------


def _put_all(drafts: list[_Draft], resolver: Resolver, check: Check, *, syncs: bool) -> None:
    """Write all files beside their targets, then let them take their places: not one of them if `check` ends the work
    before the first has its place, and all of them otherwise."""
    drafts = sorted(drafts, key=lambda draft: draft.encoded)  # so that no two requests wait for each other's files
    with ExitStack() as stack:
        try:
            for draft in drafts:
                check()
                draft.target = target = resolver.target_for_writing(draft.encoded)
                stack.enter_context(held(target, must=True))
                _write_beside(draft, target)
                if len(drafts) > 1 and draft.before is not None:
                    _keep(draft)
            check()
            for draft in drafts:
                _put(draft, syncs=syncs)
        except BaseException as error:
            for each in reversed(drafts):
                _put_back(each)
            if isinstance(error, OSError):
                raise refusal(error, draft.path) from None
            raise
    for draft in drafts:
        if draft.spare and draft.target is not None:
            os.unlink(draft.spare, dir_fd=draft.target.directory_fd)


def _check_place(draft: _Draft, resolver: Resolver) -> None:
    """Refuse what could not be put in place, as far as the modes of the directory and the file tell it."""
    directory, name = os.path.split(draft.encoded)
    fd, real, _ = _part_that_exists(directory, draft.path, resolver)
    try:
        if not os.access(b".", os.W_OK | os.X_OK, dir_fd=fd):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if draft.before is not None:
            check_writable(FileTarget(fd, real, name, 0))
    except OSError as error:
        raise refusal(error, draft.path) from None
    finally:
        os.close(fd)


def _write_beside(draft: _Draft, target: FileTarget) -> None:
    present = status_of(target.name, target.directory_fd)
    if (etag_of(present) if present else "").removeprefix("W/") != draft.etag.removeprefix("W/"):
        raise Refused("EXISTS", f"another process changed the file meanwhile: {draft.path[:200]}")
    check_writable(target)
    if draft.after is not None:
        draft.temporary = temporary_name(os.getpid())
        draft.fd = open_new(target.directory_fd, draft.temporary)
        data = memoryview(draft.after)
        while data:
            data = data[os.write(draft.fd, data) :]


def _keep(draft: _Draft) -> None:
    """Give the old file a second name, from which it can be put back in one step."""
    assert draft.target is not None
    name, fd = temporary_name(os.getpid()), draft.target.directory_fd
    os.link(draft.target.name, name, src_dir_fd=fd, dst_dir_fd=fd)
    draft.spare = name


def _put(draft: _Draft, *, syncs: bool) -> None:
    target = draft.target
    assert target is not None
    if draft.after is not None:
        put_in_place(draft.fd, draft.temporary, target, syncs=syncs, create_only=draft.before is None)
        return
    with open(os.open(target.name, READ, dir_fd=target.directory_fd), "rb") as file:
        os.unlink(target.name, dir_fd=target.directory_fd)
        if syncs:
            sync_name(file.fileno(), target)


def _put_back(draft: _Draft) -> None:
    """Undo what was done for a draft, unless another process has replaced the file since: nobody has locked the new
    one. Never raises: the other files must be put back, too."""
    if draft.target is None:
        return
    fd, name = draft.target.directory_fd, draft.target.name
    try:
        present = status_of(name, fd)
        if draft.after is None:
            was_placed = present is None
        else:
            was_placed = present is not None and draft.fd >= 0 and os.path.samestat(present, os.fstat(draft.fd))
        if draft.spare and was_placed:
            os.rename(draft.spare, name, src_dir_fd=fd, dst_dir_fd=fd)
        elif draft.spare:
            os.unlink(draft.spare, dir_fd=fd)
        elif was_placed and draft.before is None:
            os.unlink(name, dir_fd=fd)
        if draft.fd >= 0 and not was_placed and os.fstat(draft.fd).st_nlink:
            os.unlink(draft.temporary, dir_fd=fd)
    except OSError:  # the spare keeps the old content, under its own name
        pass


def _etag_now(draft: _Draft, resolver: Resolver) -> str:
    if draft.after is None:
        return ""
    try:
        fd, _ = resolver.open_existing(draft.encoded)
    except (OSError, Refused):  # removed since
        return ""
    try:
        return etag_of(os.fstat(fd))
    finally:
        os.close(fd)
