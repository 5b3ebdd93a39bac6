"""Python SDK: the asynchronous client. `sandkasten.sync` is its blocking twin, made from these files.

Imports `errors` and `contexts`, and an HTTP library in one file; every client above imports it. Begin with `client.py`:
`SandboxClient` makes sessions; `session.py` says what a session can do, `run.py`, `files.py`, `terminal.py` its parts.
`transport.py` sends and repeats, `streams.py` and `channels.py` resume; `wire.py`, `text.py` and `types.py` know the
format and do no I/O. Names are imported on first use (PEP 562): the server needs `text.py` alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandkasten.sdk.client import SandboxClient, Workspace
    from sandkasten.sdk.files import Files, FileStream
    from sandkasten.sdk.run import Run
    from sandkasten.sdk.session import Session
    from sandkasten.sdk.streams import Events
    from sandkasten.sdk.terminal import Terminal

__all__ = ["Events", "FileStream", "Files", "Run", "SandboxClient", "Session", "Terminal", "Workspace"]

_HOME = {
    "Events": "streams",
    "FileStream": "files",
    "Files": "files",
    "Run": "run",
    "SandboxClient": "client",
    "Session": "session",
    "Terminal": "terminal",
    "Workspace": "client",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
