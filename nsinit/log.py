"""Log lines of nsinit: one JSON object a line on descriptor 2. Never waits: a line for which there is no room is
dropped.
"""

from __future__ import annotations

import json
import os
import select

MAX_LINE_BYTES = 4096
"""A pipe takes this much in one piece (PIPE_BUF), so lines never mix."""

_MAX_TEXT = 200
"""Characters of one field; JSON makes up to 12 bytes of each."""


def log(level: str, event: str, session_id: str | None = None, **fields: object) -> None:
    """Write one line; `fields` must be JSON values and hold nothing a sandbox wrote."""
    record = {"level": level, "logger": "nsinit", "event": event, "session_id": session_id, **fields}
    clipped = {key: _clip(value) for key, value in record.items() if value is not None}
    line = json.dumps(clipped).encode()
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    if any(events & select.POLLOUT for _, events in poller.poll(0)):
        try:
            os.write(2, line + b"\n")
        except OSError:
            pass  # the reader is gone; there is nobody to tell


def _clip(value: object) -> object:
    return value[:_MAX_TEXT] if isinstance(value, str) else value
