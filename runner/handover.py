"""The files through which a command reaches the shell's driver, and their removal.

It must not open what the driver opens as streams, but for the FIFO of a standard input, which has an owner of its own.

Sources: `runner.driver` says what each file is for.
"""

from __future__ import annotations

import os

from runner import driver
from runner.context import Context
from runner.protocol import Exec
from runner.stdin import StdinPipe


def mode_of(request: Exec) -> str:
    """Return the mode word of a command's line on `ctl`."""
    has_variables = request.cwd is not None or bool(request.env)
    letters = (driver.WITH_VARIABLES if has_variables else "") + (driver.WITH_STDIN if request.stdin else "")
    return letters or driver.PLAIN


def write(context: Context, request: Exec, stdin: StdinPipe | None) -> None:
    """Make the files of a command.

    Raises:
        OSError: the private directory is full, say.
    """
    _write_file(context.file("cmd"), request.command)
    if mode_of(request) == driver.PLAIN:
        return
    cwd = None if request.cwd is None else os.path.join(context.config.workspace, request.cwd)
    _write_file(context.file("pre"), driver.prologue(cwd, request.env))
    _write_file(context.file("post"), driver.epilogue(cwd, request.env))
    if stdin is not None:
        stdin.open(context.file("in"))
    else:
        os.symlink("/dev/null", context.file("in"))


def remove(context: Context, request: Exec) -> None:
    """Remove what `write` made, as far as it is there."""
    for name in ("cmd",) if mode_of(request) == driver.PLAIN else ("cmd", "pre", "post", "in"):
        try:
            os.unlink(context.file(name))
        except FileNotFoundError:
            pass


def _write_file(path: str, text: str) -> None:
    content = os.fsencode(text)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        while content:
            content = content[os.write(fd, content) :]
    finally:
        os.close(fd)
