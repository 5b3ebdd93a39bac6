"""Text for models: terminal noise removed, the middle of what is long left out, the end of a command in one line.

Pure. A model pays for every character of an answer in each later turn of its conversation.
"""

from __future__ import annotations

import re

from sandkasten.sdk.types import ExecResult, RunEnd

MAX_CHARS = 30_000
"""Longest text of one answer, in characters: half from its head and half from its tail."""

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, movements (ECMA-48 §5.4)
    r"|[PX^_\]](?:[^\x07\x1b]|\x1b(?!\\))*(?:\x07|\x1b\\)?"  # strings: titles, links (ECMA-48 §5.6)
    r"|[ -/]*[0-~])"
)
_OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n|\Z)")
"""The part of a line before the last carriage return: a progress bar's earlier states."""


def clean(text: str) -> str:
    """Return a text as a terminal would leave it on the screen: no escape sequence, no overwritten line."""
    text = _ESCAPE.sub("", text).replace("\r\n", "\n")
    return _OVERWRITTEN.sub("", text).replace("\r", "\n")


def words_of_size(count: int) -> str:
    """Return a number of bytes in words: `512 bytes`, `1.2 MB` (powers of 1000)."""
    if count < 1000:
        return f"{count} bytes"
    for unit in ("kB", "MB", "GB"):
        count_of_unit = count / 1000 ** (1 + ("kB", "MB", "GB").index(unit))
        if count_of_unit < 999.95 or unit == "GB":
            return f"{count_of_unit:.1f} {unit}"
    raise AssertionError


def shorten(text: str, advice: str = "", *, max_chars: int = MAX_CHARS) -> tuple[str, bool]:
    """Return a text with its middle left out if it is long, and whether it was.

    A line between head and tail says how much is missing, and `advice` how to get it. Lines stay whole where they are
    short enough.
    """
    if len(text) <= max_chars:
        return text, False
    half = max_chars // 2
    head, tail = text[:half], text[-half:]
    if (cut := head.rfind("\n")) > half * 3 // 4:
        head = head[: cut + 1]
    if -1 < (cut := tail.find("\n")) < half // 4:
        tail = tail[cut + 1 :]
    left_out = len(text[len(head) : len(text) - len(tail)].encode())
    gap = f"… {words_of_size(left_out)} left out{'; ' if advice else ''}{advice} …"
    return f"{head}{'' if head.endswith(chr(10)) else chr(10)}{gap}\n{tail}", True


def ending(end: ExecResult | RunEnd) -> str:
    """Return the end of a command as one line: `[exit 1, 2.3 s, cwd /workspace]`."""
    seconds = f"{end.duration_ms / 1000:.1f} s"
    cwd = f"cwd {end.cwd}" if end.cwd else ""
    return f"[{', '.join(part for part in (_cause(end), seconds, cwd) if part)}]"


def _cause(end: ExecResult | RunEnd) -> str:
    shell = "shell restarted" if end.shell_restarted else "shell kept"
    match end.cause:
        case "timed_out":
            limit = "" if end.timeout_ms is None else f" after {end.timeout_ms / 1000:g} s"
            return f"timed out{limit}, {shell}"
        case "oom":
            victim = f" ({end.victim})" if end.victim else ""
            return f"killed: out of memory{victim}, exit {end.exit_code}, {shell}"
        case "cancelled":
            return f"cancelled, {shell}"
        case "pids_limit":
            return f"failed: too many processes, exit {end.exit_code}"
        case "disk_full":
            return f"failed: the disk is full, exit {end.exit_code}"
        case "sandbox_died":
            return "the sandbox died"
        case "shell_died":
            return f"the shell died, exit {end.exit_code}, {shell}"
        case _:
            return f"exit {end.exit_code}" + (", shell restarted" if end.shell_restarted else "")
