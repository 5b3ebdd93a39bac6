"""What lies in the spool's directory, by name: whose it is, and how it is removed when it is nobody's.

Knows the names that `spool_segment.py` and `run_archive.py` give their files and nothing of what is in them. A name is
told in a form that can be printed and sent; it is only compared with what is found again and never becomes a path.
Every function that touches the disk blocks, and is for worker threads.

Sources: unlink(2) (a link is removed, not followed; a directory is refused).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs

from sandkasten.model import SESSION_ID
from sandkasten.output.run_archive import RUNS_NAME
from sandkasten.output.spool_segment import SEGMENT_SUFFIX

_MAX_NAME = 400


@attrs.frozen
class SpoolFile:
    """One entry. `session_id`: whose runs, or their ids, are written down in it; None in a segment and in what is
    neither."""

    name: str
    session_id: str | None = None


def list_spool(root: Path) -> Sequence[SpoolFile]:
    """Return what there is, by name; nothing where there is no such directory. Raises `OSError`."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return ()
    return [SpoolFile(shown(name), session_of(name)) for name in sorted(names)]


def remove_spool_files(root: Path, names: Collection[str]) -> Mapping[str, str]:
    """Remove files of these names; return why, for each that is left. Raises `OSError` if it can't look for them."""
    refused = {}
    for name in os.listdir(root):
        if shown(name) in names:
            try:
                os.unlink(root / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                refused[shown(name)] = error.strerror or str(error)
    return refused


def is_segment(name: str) -> bool:
    """Whether a file of that name may hold output of the daemon that runs."""
    return name.endswith(SEGMENT_SUFFIX)


def session_of(name: str) -> str | None:
    """Return the session whose runs or ids are in a file of that name."""
    match = RUNS_NAME.fullmatch(name)
    return match[1] if match is not None and SESSION_ID.match(match[1]) else None


def shown(name: str) -> str:
    """Return a name as it is told, whatever bytes it has."""
    return os.fsencode(name).decode("ascii", "backslashreplace")[:_MAX_NAME]
