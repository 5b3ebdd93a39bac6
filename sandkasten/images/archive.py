"""Import an image from a tar archive: unpack it in a jail, look it over, give it its name.

Never parses the archive itself: `nsinit/unpack.py` does, in a process that sees only the new image, and what that
answers is checked like anything hostile. A failed import leaves nothing. Blocking: call it from a thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nsinit import protocol as nsinit_protocol
from sandkasten.crash import Crash, Point
from sandkasten.errors import InvalidImage
from sandkasten.images import rootfs
from sandkasten.images.catalog import Catalog, Image, now

MAX_MEMBERS = 2_000_000
MAX_BYTES = 64 * 1024**3
_UNPACK = Path(nsinit_protocol.__file__).with_name("unpack.py")
_MAX_ANSWER_BYTES = 4096
_EXIT_S = 10


def import_tar(
    catalog: Catalog,
    name: str,
    tar: Path,
    *,
    max_members: int = MAX_MEMBERS,
    max_bytes: int = MAX_BYTES,
    crash: Crash | None = None,
) -> tuple[Image, dict[str, int]]:
    """Make image `name` of a tar file; return it and the counts `members`, `bytes`, `skipped`, `privileged`.

    Raises:
        InvalidImage: the name is malformed or taken, the archive can't be unpacked, or it holds no usable root.
        OSError: the archive can't be opened.
    """
    crash = crash or Crash()
    with catalog.building(name) as directory:
        crash.passing(Point.IMPORT_BEGUN)
        if catalog.rootfs_path(name).exists():
            raise InvalidImage(f"there is an image {name!r} already", image=name)
        with tar.open("rb") as file:
            counts = _unpack(directory / "rootfs", file.fileno(), max_members, max_bytes)
        crash.passing(Point.IMPORT_UNPACKED)
        problems = rootfs.find_problems(str(directory / "rootfs"))
        if problems:
            raise InvalidImage(f"{tar.name} holds no usable image: {'; '.join(problems)}", image=name)
        crash.passing(Point.IMPORT_CHECKED)
        image = Image(
            name=name,
            kind="rootfs",
            created_at=now(),
            source=tar.name,
            members=counts["members"],
            size_bytes=counts["bytes"],
        )
        published = catalog.publish(directory, image)
        crash.passing(Point.IMPORT_PUBLISHED)
        return published, counts


def _unpack(target: Path, tar_fd: int, max_members: int, max_bytes: int) -> dict[str, int]:
    command = [sys.executable, "-I", "-S", "-B", str(_UNPACK), str(target), str(max_members), str(max_bytes)]
    process = subprocess.Popen(
        command, stdin=tar_fd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", env={"LANG": "C.UTF-8"}
    )
    assert process.stdout is not None
    with process:
        try:
            answer = _read_answer(process.stdout.read(_MAX_ANSWER_BYTES))
            status = process.wait(_EXIT_S)
        finally:
            process.kill()  # takes the jail along (PR_SET_PDEATHSIG); end of file says that it is gone, too
            process.stdout.read()
    if status == 0 and answer.keys() == {"members", "bytes", "skipped", "privileged"}:
        return {key: value for key, value in answer.items() if isinstance(value, int)}
    reason = answer.get("error") or f"the unpacking process ended with status {status}"
    raise InvalidImage(f"the archive can't be unpacked: {str(reason)[:500]}")


def _read_answer(data: bytes) -> dict[str, object]:
    try:
        answer = json.loads(data[:_MAX_ANSWER_BYTES])
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
