"""The allowance of a grant, for tests."""

from __future__ import annotations

from nsinit.wire.launching import Allowance
from nsinit.wire.protocol import DiskLimits

ALLOWANCE = Allowance(
    profiles=("strict",),
    own_profiles=[],
    images=("host",),
    root_inside=False,
    memory_bytes=1 << 30,
    pids=256,
    cpu_quota_us=100_000,
    disk=DiskLimits(1 << 30, 10_000),
    quota_bytes=1 << 30,
    open_files=4096,
    tmp_bytes=64 << 20,
    shm_bytes=32 << 20,
    merge_pages=False,
    way_out=False,
    bridge=None,
)
"""The allowance of a daemon in tests."""
