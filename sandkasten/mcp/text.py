"""Text for models: terminal noise removed, the middle of what is long left out, the end of a command in one line.

Pure. A model pays for every character of an answer in each later turn of its conversation.
"""

from __future__ import annotations

from sandkasten.sdk.text import without_sequences
from sandkasten.sdk.types import ExecResult, RunEnd

MAX_CHARS = 30_000
"""Longest text of one answer, in characters: half from its head and half from its tail."""


def clean(text: str) -> str:
    """Return a text as a terminal would leave it on the screen: no escape sequence, and of a line that was overwritten,
    as by a progress bar, its last state."""
    lines = without_sequences(text).split("\n") if "\r" in text or "\x1b" in text else [text]
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def words_of_size(count: int) -> str:
    """Return a number of bytes in words: `512 bytes`, `1.2 MB` (powers of 1000)."""
    if count < 1000:
        return f"{count} bytes"
    for unit in ("kB", "MB", "GB"):
        count_of_unit = count / 1000 ** (1 + ("kB", "MB", "GB").index(unit))
        if count_of_unit < 999.95 or unit == "GB":
            return f"{count_of_unit:.1f} {unit}"
    raise AssertionError


def shorten(
    text: str, advice: str = "", *, offset: int = 0, missing: int = 0, max_chars: int = MAX_CHARS
) -> tuple[str, bool]:
    """Return a text with its middle left out if it is long, and whether it was.

    A line between head and tail says how much is missing, and `advice` how to get it: `{}` in it stands for the byte
    to read on from, where `offset` is that of the text. A character had at least a byte, so that place is never behind
    the gap's beginning. Lines stay whole where they are short enough. `missing`: bytes that the text lacks already.
    """
    if len(text) <= max_chars:
        return text, False
    half = max_chars // 2
    head, tail = text[:half], text[-half:]
    if (cut := head.rfind("\n")) > half * 3 // 4:
        head = head[: cut + 1]
    if -1 < (cut := tail.find("\n")) < half // 4:
        tail = tail[cut + 1 :]
    left_out = missing + len(text[len(head) : len(text) - len(tail)].encode())
    advice = advice.format(offset + len(head))
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
