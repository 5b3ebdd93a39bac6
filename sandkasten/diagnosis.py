"""What is known of one session when somebody has to find out what is wrong with it, as values. Owns no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs

from sandkasten.model import Session


@attrs.frozen
class Unavailable:
    """In place of a part that could not be had, and why."""

    reason: str


Part = Mapping[str, Any] | Unavailable
"""JSON values under names that say their units."""


@attrs.frozen
class Diagnosis:
    """A session as it was at one moment, part by part. Holds no command, no output and no environment."""

    time: datetime
    session: Session
    parts: Mapping[str, Part]
