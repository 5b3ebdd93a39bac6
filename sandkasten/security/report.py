"""Findings and results as lines for people, as JSON for programs. Text out of a session is shown without control
characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from sandkasten.security.campaign import Result
from sandkasten.security.posture import Finding
from sandkasten.security.probes.attempt import BROKEN, HELD, NOT_APPLICABLE

_ID, _USER, _STANDS_FOR, _EXPECTED, _SEEN = 31, 7, 35, 30, 48
HEADER = (
    f"{'VERDICT':<14} {'ATTEMPT':<{_ID}} {'AS':<{_USER}} {'STANDS FOR':<{_STANDS_FOR}} {'EXPECTED':<{_EXPECTED}} SEEN"
)


def result_line(result: Result) -> str:
    """Return one line of the table; the observation of a held attempt is cut."""
    attempt = result.attempt
    seen = plain(result.seen)
    if result.verdict == HELD:
        seen = cut(seen, _SEEN)
    return (
        f"{result.verdict:<14} {attempt.id:<{_ID}} {result.user or '-':<{_USER}}"
        f" {cut(attempt.stands_for, _STANDS_FOR):<{_STANDS_FOR}}"
        f" {cut(' or '.join(attempt.expected), _EXPECTED):<{_EXPECTED}} {seen}"
    )


def summary(results: Sequence[Result], duration_s: float) -> str:
    """Return the last line: the counts of attempts by verdict."""
    counts = Counter(each.verdict for each in results)
    parts = [f"{counts[verdict]} {verdict}" for verdict in (HELD, BROKEN, NOT_APPLICABLE) if counts[verdict]]
    return f"{len(results)} attempts in {duration_s:.1f} s: {', '.join(parts)}"


def finding_lines(finding: Finding) -> list[str]:
    """Return a finding as three lines: observation, reason, fix."""
    return [
        f"{finding.severity:<7} {finding.id}: {plain(finding.what)}",
        f"        why: {finding.why}",
        f"        fix: {plain(finding.fix)}",
    ]


def result_json(result: Result) -> dict[str, object]:
    """Return a result as JSON values."""
    attempt = result.attempt
    return {
        "id": attempt.id,
        "class": attempt.group,
        "what": attempt.what,
        "stands_for": attempt.stands_for,
        "user": result.user or None,
        "expected": list(attempt.expected),
        "seen": result.seen,
        "verdict": result.verdict,
        "duration_ms": result.duration_ms,
    }


def finding_json(finding: Finding) -> dict[str, object]:
    """Return a finding as JSON values."""
    return attrs.asdict(finding)


def cut(text: str, width: int) -> str:
    """Return at most `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def plain(text: str) -> str:
    """Return printable text: text out of a session must not drive a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
