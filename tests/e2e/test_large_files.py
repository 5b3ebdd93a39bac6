"""A file as large as a disk image, through the daemon and back: a campaign, for the minute that it takes."""

from __future__ import annotations

import httpx

from tests.e2e.daemon import Daemon
from tests.e2e.test_files import send_and_fetch

COUNT = 5 * 1024


def test_a_file_of_five_gibibytes_whose_connection_breaks_arrives_whole(daemon: Daemon, client: httpx.Client) -> None:
    """Memory stays within the bounds of a file of 384 MiB."""
    session = client.post("/v1/sessions", json={"limits": {"disk_mb": COUNT + 64}}).json()["id"]
    send_and_fetch(daemon, client, f"/v1/sessions/{session}/fs", COUNT)
