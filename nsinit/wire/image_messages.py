"""The part of `protocol` about images that are made of an archive. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnpackImage:
    """First and only message to an nsinit that is not started: unpack the archive that comes along, a descriptor open
    for reading, into the empty draft of an image, and end. Not for a daemon that is not root.

    `draft_name`: the directory below `images` in which `rootfs` lies. More members, or bytes of files, than allowed end
    it. Answer: `Unpacked`, or `Failed`: at the stage `unpack` in words about the archive. Whoever hangs up before that
    ends it, too.
    """

    seq: int
    data_dir: str
    draft_name: str
    max_members: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Unpacked:
    """How much came of it. `skipped`: members left out; `privileged`: files whose setuid or setgid bit was dropped."""

    seq: int
    members: int
    size_bytes: int
    skipped: int
    privileged: int
