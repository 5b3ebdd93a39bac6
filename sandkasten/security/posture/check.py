"""Puts the checks together for this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sandkasten.config import Config
from sandkasten.security.posture.finding import Finding, in_order
from sandkasten.security.posture.machine import check_machine
from sandkasten.security.posture.places import check_places
from sandkasten.security.posture.settings import check_settings


def find_weaknesses(config: Config, config_path: Path | None) -> list[Finding]:
    """Return all findings, the gravest first."""
    existing = next(each for each in (config.data_dir, *config.data_dir.parents) if each.exists())
    settings = check_settings(
        config,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        cpus=len(os.sched_getaffinity(0)),
        free_bytes=shutil.disk_usage(existing).free,
    )
    return in_order([*settings, *check_places(config, config_path), *check_machine(config.data_dir)])
