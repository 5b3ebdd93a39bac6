"""Python SDK: the asynchronous client. `sandkasten.sync` is its blocking twin, made from these files.

Imports `sandkasten.errors` and nothing else of ours, and httpx2 in one file. Begin with `client.py`: `SandboxClient`
makes sessions; `session.py` has what a session can do; `run.py`, `files.py` and `terminal.py` its parts. `transport.py`
sends and repeats, `streams.py` resumes; `wire.py` and `types.py` know the format and do no I/O.
"""

from __future__ import annotations

from sandkasten.sdk.client import SandboxClient, Workspace
from sandkasten.sdk.files import Files, FileStream
from sandkasten.sdk.run import Run
from sandkasten.sdk.session import Session
from sandkasten.sdk.streams import Events
from sandkasten.sdk.terminal import Terminal

__all__ = ["Events", "FileStream", "Files", "Run", "SandboxClient", "Session", "Terminal", "Workspace"]
