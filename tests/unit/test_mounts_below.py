"""Which mounts are in places of the data directory where none should be."""

from __future__ import annotations

from pathlib import Path

from sandkasten.runtime.mounts_below import find_mounts

INFO = r"""
22 1 8:1 / / rw - ext4 /dev/sda rw
23 22 8:2 / /data rw - ext4 /dev/sdb rw
24 23 8:2 /x /data/sessions/a\040b\134 rw shared:1 - ext4 /dev/sdb rw
25 24 0:9 / /data/sessions/a\040b\134/deep rw - tmpfs none rw
26 23 0:9 / /data/workspaces/w rw - tmpfs none rw
27 23 0:9 / /data/sessions-old rw - tmpfs none rw
28 23 0:9 / /data/trash rw - tmpfs none rw
""".strip()


def test_mounts_below_places_of_sessions_are_found_by_their_real_names() -> None:
    """Escapes undone, outermost first; the data directory itself and workspaces may be mounts."""
    found = find_mounts(Path("/data"), INFO)
    assert found == ["/data/sessions/a b\\", "/data/sessions/a b\\/deep", "/data/trash"]
