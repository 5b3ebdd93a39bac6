"""The files through which a command reaches the shell's driver, and their removal.

It must not open what the driver opens as streams (`streams`, `terminal`).

Sources: `runner.shell.command_driver` says what each file is for.
"""

from __future__ import annotations

import os

from runner.loop.private import open_private, remove_private
from runner.shell import command_driver, repl, terminal_driver
from runner.shell.shell import Shell
from runner.wire.protocol import Exec


def mode_of(request: Exec, *, has_news: bool) -> str:
    """Return the mode word of a command's line on `ctl`; `has_news`: the shell is to be told something before it."""
    if request.terminal is not None:
        return command_driver.WITH_VARIABLES + command_driver.WITH_STDIN
    has_variables = has_news or request.cwd is not None or bool(request.env)
    letters = (command_driver.WITH_VARIABLES if has_variables else "") + (
        command_driver.WITH_STDIN if request.stdin else ""
    )
    return letters or command_driver.PLAIN


def write(shell: Shell, request: Exec, mode: str, *, workspace: str) -> None:
    """Make the files of a command.

    Raises:
        OSError: the private directory is full, say.
    """
    text = repl.text(shell.directory, shell.argv) if request.interactive else request.command
    _write_file(shell.file("cmd"), text)
    if mode == command_driver.PLAIN:
        return
    cwd = None if request.cwd is None else os.path.join(workspace, request.cwd)
    before, after = command_driver.prologue(cwd, request.env), command_driver.epilogue(cwd, request.env)
    if request.terminal is not None:
        before = terminal_driver.enter(shell.directory, interactive=request.interactive) + before
        after += (repl.LEAVE if request.interactive else "") + terminal_driver.leave(shell.directory)
    if shell.is_deaf:
        before = terminal_driver.restore(shell.directory) + before
    _write_file(shell.file("pre"), command_driver.news(shell.news()) + before)
    _write_file(shell.file("post"), after)


def remove(shell: Shell, mode: str) -> None:
    """Remove what `write` made, as far as it is there."""
    for name in ("cmd",) if mode == command_driver.PLAIN else ("cmd", "pre", "post"):
        remove_private(shell.file(name))


def _write_file(path: str, text: str) -> None:
    content = os.fsencode(text)
    fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        while content:
            content = content[os.write(fd, content) :]
    finally:
        os.close(fd)
