"""Sandkasten: sandboxes for AI agents. The client of a server, and the server as a library on trio.

`SandboxClient` speaks to a server from asyncio or trio, `sandkasten.sync.SandboxClient` from threads. `async with
sandkasten.open_supervisor(config) as supervisor:` runs the supervisor tree inside any trio program; that needs the
extra `server`. Names are imported on first use (PEP 562), so that the command line starts at once. Begin
with `docs/architecture.md`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandkasten.app import open_supervisor
    from sandkasten.config import Config, Defaults
    from sandkasten.errors import SandkastenAPIError, SandkastenError, SandkastenStreamError
    from sandkasten.installation import ConfigError
    from sandkasten.model import ExecSpec, Limits, SessionPatch, SessionSpec
    from sandkasten.sdk import SandboxClient, Session
    from sandkasten.sdk.types import ExecChunk, ExecResult, ReadResult, SessionInfo, SessionStats, WorkspaceInfo
    from sandkasten.supervisor import Supervisor

__all__ = [
    "Config",
    "ConfigError",
    "Defaults",
    "ExecChunk",
    "ExecResult",
    "ExecSpec",
    "Limits",
    "ReadResult",
    "SandboxClient",
    "SandkastenAPIError",
    "SandkastenError",
    "SandkastenStreamError",
    "Session",
    "SessionInfo",
    "SessionPatch",
    "SessionSpec",
    "SessionStats",
    "Supervisor",
    "WorkspaceInfo",
    "open_supervisor",
]

_HOME = {
    "Config": "config",
    "ConfigError": "installation",
    "Defaults": "config",
    "ExecChunk": "sdk.types",
    "ExecResult": "sdk.types",
    "ExecSpec": "model",
    "Limits": "model",
    "ReadResult": "sdk.types",
    "SandboxClient": "sdk",
    "SandkastenAPIError": "errors",
    "SandkastenError": "errors",
    "SandkastenStreamError": "errors",
    "Session": "sdk",
    "SessionInfo": "sdk.types",
    "SessionPatch": "model",
    "SessionSpec": "model",
    "SessionStats": "sdk.types",
    "Supervisor": "supervisor",
    "WorkspaceInfo": "sdk.types",
    "open_supervisor": "app",
}
_AGENTS = ("SandkastenContext", "create_sandkasten_tools", "sandbox_tools_for_workspace", "sandkasten_tools")
_OF_THE_SERVER = {"app", "config", "model", "supervisor"}


def _refuse_published_client() -> None:
    """Refuse an environment with the distribution `sandkasten` 0.x, which writes files of the same names.

    Raises:
        ImportError: the distribution is there.
    """
    try:
        names = os.listdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    except OSError:  # an archive, in which nobody installs
        return
    if any(name.startswith("sandkasten-0.") and name.endswith(".dist-info") for name in names):
        raise ImportError(
            "the distribution `sandkasten` is installed beside `sandkasten-runtime` and each overwrites files of the "
            "other: run `pip uninstall sandkasten`, then `pip install --force-reinstall --no-deps sandkasten-runtime`"
        )


_refuse_published_client()


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("sandkasten-runtime")
    if name in _AGENTS:
        return getattr(import_module(f"{__name__}.agents"), name)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if _HOME[name] in _OF_THE_SERVER:
            raise ImportError(f"{name} needs the server: pip install 'sandkasten-runtime[server]'") from error
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
