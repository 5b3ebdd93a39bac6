"""Which mounts are in places of the data directory where none should be, told from a mount table."""

from __future__ import annotations

from nsinit.server.mounts import HandMount, find_hand_mounts, points_below

INFO = r"""
22 1 8:1 / / rw - ext4 /dev/sda rw
23 22 8:2 / /data rw - ext4 /dev/sdb rw
24 23 8:2 /x /data/sessions/a\040b\134 rw shared:1 - ext4 /dev/sdb rw
25 24 0:9 / /data/sessions/a\040b\134/deep rw - tmpfs none rw
26 23 0:9 / /data/workspaces/w rw - tmpfs none rw
27 23 0:9 / /data/sessions-old rw - tmpfs none rw
28 23 0:9 / /data/trash rw - tmpfs none rw
29 25 0:9 / /data/sessions/a\040b\134/deep rw - tmpfs none rw
""".strip()


def test_mounts_in_places_of_sessions_are_found_by_their_real_names() -> None:
    """Escapes undone, the last made first; the data directory itself, its neighbours and workspaces may be mounts."""
    found = find_hand_mounts("/data", INFO)
    outer, deep = "/data/sessions/a b\\", "/data/sessions/a b\\/deep"
    assert found == [
        HandMount(29, deep, is_place=False),
        HandMount(28, "/data/trash", is_place=True),
        HandMount(25, deep, is_place=False),
        HandMount(24, outer, is_place=False),
    ]
    assert points_below(found) == [deep, outer]
