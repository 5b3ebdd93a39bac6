"""The ledger of a soak: promises that were made, violations, and how often each thing happened.

A promise is an answer: bytes whose write was confirmed must be there for ever, whatever is killed. A request that got
no answer may have had its effect or not; neither is a violation.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import attrs

_KEPT_VIOLATIONS = 20


@attrs.define
class Ledger:
    """Counts, violations, and the checksum of every file that was confirmed, by workspace and name."""

    counts: Counter[str] = attrs.field(factory=Counter)
    violations: list[str] = attrs.field(factory=list)
    files: dict[str, dict[str, str]] = attrs.field(factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] += number

    def violate(self, what: str) -> None:
        """Note an event that may never happen."""
        self.count("violations")
        if len(self.violations) < _KEPT_VIOLATIONS:
            self.violations.append(what)

    def confirm(self, workspace: str, name: str, content: bytes) -> None:
        """Note that a file with that content was confirmed."""
        self.files.setdefault(workspace, {})[name] = checksum(content)

    @property
    def confirmed(self) -> int:
        """Number of files that must be there."""
        return sum(len(names) for names in self.files.values())

    def check(self, workspace: str, name: str, content: bytes | None) -> None:
        """Compare a file with what was confirmed."""
        promised = self.files[workspace][name]
        if content is None:
            self.violate(f"workspace {workspace}: {name} is gone")
        elif checksum(content) != promised:
            self.violate(f"workspace {workspace}: {name} has other bytes ({len(content)})")
        else:
            self.count("workspace files checked")


def checksum(content: bytes) -> str:
    """Return the SHA-256 of the content."""
    return hashlib.sha256(content).hexdigest()
