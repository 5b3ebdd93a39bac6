"""Maker of the blocking client: the files of `sandkasten/sdk` with other tokens, as `sandkasten/sync`.

`python -m tests.sdk.twin` writes the files, and a test compares them.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

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


if __name__ == "__main__":
    for each in MODULES:
        (TARGET / f"{each}.py").write_text(make(each))
