"""Lines of a text file, as tools that show text to a reader want them. Work of a file worker; may block."""

from __future__ import annotations

import os
from io import BufferedWriter, RawIOBase

from runner.files.contents import open_part
from runner.files.paths import Resolver
from runner.loop.context import Refused
from runner.wire.protocol import GetFile, Viewed, ViewFile

MAX_VIEW_BYTES = 1024 * 1024
_PIECE_BYTES = 64 * 1024


def view(request: ViewFile, resolver: Resolver, raw: RawIOBase) -> Viewed:
    """Send the lines that are wanted, as many as there is room for, and count all lines. Memory is bounded, however
    long a line is.

    Raises:
        Refused: `BAD_REQUEST`, the lines that are wanted end before they begin; others as `open_part`.
    """
    if request.first < 1 or (request.last is not None and request.last < request.first):
        raise Refused("BAD_REQUEST", "the first line must be at least 1, and not behind the last")
    fd, part = open_part(GetFile(request.path), resolver)
    with open(fd, "rb", _PIECE_BYTES) as file, BufferedWriter(raw, _PIECE_BYTES) as out:
        total = sent = last = 0
        is_begin, truncated = True, False
        while piece := file.readline(_PIECE_BYTES):
            total += is_begin
            is_begin = piece.endswith(b"\n")
            if total < request.first or truncated or (request.last is not None and total > request.last):
                continue
            room = MAX_VIEW_BYTES - sent
            truncated = len(piece) > room
            if room:
                sent, last = sent + out.write(piece[:room]), total
    return Viewed(os.fsdecode(part.path), part.etag, request.first, last, total, truncated)
