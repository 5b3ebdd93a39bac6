"""What a finding is, and their order. Knows nothing of where findings come from."""

from __future__ import annotations

import enum

import attrs


class Severity(enum.StrEnum):
    """`high`: an attacker needs nothing more. `medium`: one layer less. `low`: worth knowing."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


_ORDER = (Severity.HIGH, Severity.MEDIUM, Severity.LOW)


@attrs.frozen
class Finding:
    """One thing that weakens this installation: what it is, why it matters, and what to do, word for word."""

    id: str
    severity: Severity
    what: str
    why: str
    fix: str


def high(name: str, what: str, why: str, fix: str) -> Finding:
    return Finding(name, Severity.HIGH, what, why, fix)


def medium(name: str, what: str, why: str, fix: str) -> Finding:
    return Finding(name, Severity.MEDIUM, what, why, fix)


def low(name: str, what: str, why: str, fix: str) -> Finding:
    return Finding(name, Severity.LOW, what, why, fix)


def in_order(findings: list[Finding]) -> list[Finding]:
    """Return the gravest first, otherwise as they came."""
    return sorted(findings, key=lambda each: _ORDER.index(each.severity))
