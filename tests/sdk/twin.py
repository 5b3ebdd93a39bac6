"""Maker of the blocking client: the files of `sandkasten/sdk` with other tokens, as `sandkasten/sync`.

Uses of the client are rewritten in the same way, so that one text is run on asyncio, on trio and in a thread.
`python -m tests.sdk.twin` writes the files, and a test compares them.
"""

from __future__ import annotations

import functools
import io
import re
import subprocess
import sys
import tokenize
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio

ROOT = Path(__file__).parents[2]
SOURCE, TARGET = ROOT / "sandkasten/sdk", ROOT / "sandkasten/sync"
MODULES = ("channels", "client", "files", "run", "session", "streams", "terminal", "transport")
BY_HAND = "waiting"
"""The module whose twin is written by hand, since the primitives differ."""

_NAMES = {
    "AsyncConnectionPool": "ConnectionPool",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "aclosing": "closing",
    "aiter_stream": "iter_stream",
    "anext": "next",
    "aread": "read",
    "handle_async_request": "handle_request",
}
_TWINS = re.compile(
    rf"sandkasten\.sdk(?=\.(?:{'|'.join((*MODULES, BY_HAND))})\b| import (?:{BY_HAND}|SandboxClient)\b)"
)
_WORDS = re.compile(r"\b(?:async (?=with|for)|await )")
_HEAD = "# Made from sandkasten/sdk/{}.py by tests/sdk/twin.py, not to be edited.\n"


def make(module: str) -> str:
    """Return the text of a module's twin."""
    head, mark, rest = rewrite((SOURCE / f"{module}.py").read_text()).partition("from __future__")
    made = _ruff("check", "--fix", "--quiet", "--select", "I,F401", text=f"{head}{_HEAD.format(module)}{mark}{rest}")
    return _ruff("format", "--quiet", text=made)


def rewrite(text: str) -> str:
    """Return a text for the asynchronous client as one for the blocking client."""
    text = _TWINS.sub("sandkasten.sync", text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    parts = []
    done = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        parts.append(text[done:begin])
        if token.type == tokenize.NAME and token.string in ("async", "await"):
            end += 1  # with the space that follows
        else:
            parts.append(_rename(token))
        done = end
    return "".join(parts)


def _rename(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return _NAMES.get(token.string, token.string)
    if token.type in (tokenize.STRING, tokenize.COMMENT):
        return re.sub(r"\w+", lambda word: _NAMES.get(word[0], word[0]), _WORDS.sub("", token.string))
    return token.string


def _ruff(*arguments: str, text: str) -> str:
    command = [str(Path(sys.executable).with_name("ruff")), *arguments, "--stdin-filename", str(TARGET / "x.py"), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


# Uses on all three ---------------------------------------------------------------------------------------------------

FLAVOURS = ("asyncio", "trio", "sync")


def run(flavour: str, use: Callable[..., Any], make: Callable[[Any], Any], *arguments: object) -> None:
    """Run a use with a client that `make` makes of the class, to the end."""
    import sandkasten.sdk  # here: the files of the blocking client are made without importing them
    import sandkasten.sync

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
    path = import_module(name).__file__
    assert path is not None
    with open(path) as file:
        text = rewrite(file.read())
    module = types.ModuleType(f"{name}_blocking")
    module.__file__ = path
    exec(compile(text, f"{path} (blocking)", "exec"), vars(module))
    return module


if __name__ == "__main__":
    for each in MODULES:
        (TARGET / f"{each}.py").write_text(make(each))
