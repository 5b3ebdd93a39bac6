"""The three ways to run one text: on asyncio, on trio, and in a thread with the blocking client."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import anyio

import sandkasten.sdk
import sandkasten.sync
from tests.sdk import twin

FLAVOURS = ("asyncio", "trio", "sync")


def run(flavour: str, use: Callable[..., Any], make: Callable[[Any], Any], *arguments: object) -> None:
    """Run a use with a client that `make` makes of the class, to the end."""
    if flavour == "sync":
        blocking = getattr(_blocking(use.__module__), use.__name__)
        with make(sandkasten.sync.SandboxClient) as client:
            blocking(client, *arguments)
        return

    async def main() -> None:
        async with make(sandkasten.sdk.SandboxClient) as client:
            await use(client, *arguments)

    anyio.run(main, backend=flavour)


@functools.cache
def _blocking(name: str) -> types.ModuleType:
    """Return a module of uses as the blocking client's twin of it."""
    import importlib

    path = importlib.import_module(name).__file__
    assert path is not None
    with open(path) as file:
        text = twin.rewrite(file.read())
    module = types.ModuleType(f"{name}_blocking")
    module.__file__ = path
    exec(compile(text, f"{path} (blocking)", "exec"), vars(module))
    return module
