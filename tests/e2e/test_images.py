"""Images from the command line while a daemon serves."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.e2e.daemon import SCRIPT, running_daemon
from tests.kernel.test_images_foreign import busybox_tar


def test_an_import_beside_a_running_daemon(tmp_path: Path) -> None:
    """An import runs beside the daemon, whose nsinit holds the data directory: another nsinit unpacks, and a session
    gets the image.
    """
    data_dir = tmp_path / "data"
    command = [str(SCRIPT), "image", "import", "--data-dir", str(data_dir), "--name", "tiny", "--tar"]
    with running_daemon(data_dir) as daemon, daemon.client() as client:
        done = subprocess.run([*command, str(busybox_tar(tmp_path / "x.tar"))], capture_output=True, check=True)
        assert len(done.stderr.splitlines()) == 1  # the name of the installation
        session = client.post("/v1/sessions", json={"image": "tiny"}).json()["id"]
        answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": "ls /bin"}).json()
        assert answer["output"].split() == ["busybox", "cat", "id", "ls", "sh"]
        assert client.delete(f"/v1/sessions/{session}").status_code == 200
