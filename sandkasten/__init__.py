"""Sandkasten: sandboxes for AI agents, as a library on trio.

`async with sandkasten.open_supervisor(config) as supervisor:` runs the supervisor tree inside any trio program; the
names below are its interface. The HTTP front is `sandkasten.app.serve`. Names are imported on first use (PEP 562), so
that the command line starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandkasten.app import open_supervisor
    from sandkasten.config import Config, ConfigError, Defaults
    from sandkasten.model import ExecSpec, Limits, SessionPatch, SessionSpec
    from sandkasten.model.errors import SandkastenError
    from sandkasten.supervisor import Supervisor

__all__ = [
    "Config",
    "ConfigError",
    "Defaults",
    "ExecSpec",
    "Limits",
    "SandkastenError",
    "SessionPatch",
    "SessionSpec",
    "Supervisor",
    "open_supervisor",
]

_HOME = {
    "Config": "config",
    "ConfigError": "config",
    "Defaults": "config",
    "ExecSpec": "model",
    "Limits": "model",
    "SandkastenError": "model.errors",
    "SessionPatch": "model",
    "SessionSpec": "model",
    "Supervisor": "supervisor",
    "open_supervisor": "app",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
