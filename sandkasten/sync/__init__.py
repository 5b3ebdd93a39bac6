"""Python SDK: the blocking client, which threads may share. Names and arguments are those of `sandkasten.sdk`.

`tests/sdk/twin.py` makes the files from the asynchronous ones, but for `waiting.py`; values and the wire are shared.
Imports `sdk`, `contexts` and `errors`; programs import it. Begin with `client.py`.
"""

from __future__ import annotations

from sandkasten.sync.client import SandboxClient, Workspace
from sandkasten.sync.files import Files, FileStream
from sandkasten.sync.run import Run
from sandkasten.sync.session import Session
from sandkasten.sync.streams import Events
from sandkasten.sync.terminal import Terminal

__all__ = ["Events", "FileStream", "Files", "Run", "SandboxClient", "Session", "Terminal", "Workspace"]
