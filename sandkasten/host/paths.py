"""Every path under the data directory that the daemon uses, and the id of this boot.

nsinit builds its own paths from the same layout (`nsinit/storage/paths.py`). Paths that only nsinit touches (session
overlays, workspaces, trash) are not named here, so the daemon can't reach them by accident.

Source: proc_sys_kernel(5), `random/boot_id`.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from sandkasten.config import Config
from sandkasten.installation import API_KEY_NAME, LISTENING_NAME

RUNNER_SOCKET = "r.sock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@attrs.frozen
class DataPaths:
    """The daemon's view of one data directory."""

    root: Path

    @property
    def database(self) -> Path:
        return self.root / "sandkasten.db"

    @property
    def api_key(self) -> Path:
        return self.root / API_KEY_NAME

    @property
    def keys(self) -> Path:
        """API keys besides the configured one, as digests; owned by root where the daemon has a user of its own."""
        return self.root / "keys.json"

    @property
    def listening(self) -> Path:
        """Where the daemon listens, for clients on this machine."""
        return self.root / LISTENING_NAME

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def node_id(self) -> Path:
        """The node's id, apart from the database that also knows it."""
        return self.root / "node-id"

    @property
    def machine(self) -> Path:
        """The examination of the machine that root made for a daemon that is never root."""
        return self.root / "machine.json"

    @property
    def lock(self) -> Path:
        """Held while a daemon owns this directory."""
        return self.root / "lock"

    @property
    def egress(self) -> Path:
        """The socket at which the egress process listens for the next daemon."""
        return self.root / "egress.sock"

    @property
    def spool(self) -> Path:
        """Output of runs that memory has no room for, and records of runs for the next daemon."""
        return self.root / "spool"

    @property
    def registries(self) -> Path:
        """Names and passwords for registries of images, unless the configuration has another file."""
        return self.root / "registries.json"

    @property
    def blobs(self) -> Path:
        """Layers of images on their way: what a registry sent and nobody has unpacked."""
        return self.root / "blobs"

    def run_dir(self, session_id: str) -> Path:
        """Directory that holds the runner's socket of one session."""
        return self.root / "run" / session_id


def credentials_file(config: Config) -> Path:
    """Return the file of names and passwords for registries."""
    return config.images.credentials_file or DataPaths(config.data_dir).registries


def read_boot_id() -> str:
    """Return the id of the machine's present boot, a UUID, also in a container.

    A pid and a start time name a process only within one boot. Raises `OSError` where `/proc` is not the kernel's.
    """
    return _BOOT_ID.read_text("ascii").strip()
