"""The crash walk's dealings with workspaces: what a client does with them, and what must be true afterwards.

A file holds what was last answered for, or, if a request got no answer, perhaps what that one would have made of it;
nothing in between, and never nothing. One workspace is written once, and a session that has it finds it whole through
all of the walk.
"""

from __future__ import annotations

import base64
import io
import os
import tarfile
from pathlib import Path

import attrs
import httpx

PREFIXES = (
    "nsinit.workspace.",
    "nsinit.volume.",
    "builder.files.",
    "runner.files.",
    "daemon.workspace.",
    "daemon.files.",
)
"""Prefixes of the crash points that this tour reaches."""

KEPT, WRITTEN, LIMITED, IMPORTED = "kept", "written", "limited", "imported"
_ROOM, _MIB = 4096, 1 << 20
CHECK, EXPECTED = "wc -c < f; grep -o kept f | wc -l; ls -A", f"{4 * _ROOM}\n{_ROOM}\nf\n"
"""Command that the session with the kept workspace runs, and the output that it must have."""
_TAR = {"content-type": "application/x-tar"}


@attrs.define
class WorkspaceTour:
    """Requests on workspaces. `possible`: contents that the file of a workspace may have now; None: there is no such
    workspace.
    """

    data_dir: Path
    possible: dict[str, set[str | None]] = attrs.field(factory=dict)

    def begin(self, client: httpx.Client) -> None:
        """Make the workspace that is kept."""
        assert self._write(client, KEPT, "kept" * _ROOM)

    def disturb(self, client: httpx.Client) -> bool:
        """Write, read, import, replace and delete; return whether anything went otherwise than it should."""
        done = [self._write(client, WRITTEN, text * _ROOM) for text in ("one", "two")]
        made = client.put(f"/v1/workspaces/{LIMITED}", json={"quota_bytes": 16 * _MIB})
        done += [made.status_code == 201, self._write(client, LIMITED, "one" * _ROOM)]
        done += [self._import(client, LIMITED, "two" * _ROOM, replace=True)]
        grown = client.patch(f"/v1/workspaces/{LIMITED}", json={"quota_bytes": 32 * _MIB})
        done += [grown.status_code == 200, self._write(client, LIMITED, "three" * _ROOM)]
        done += [self._import(client, IMPORTED, "three" * _ROOM, replace=replace) for replace in (False, True)]
        done += [self._write(client, IMPORTED, "four")]
        done += [self._delete(client, each) for each in (WRITTEN, LIMITED, IMPORTED)]
        return not all(done)

    def account(self, client: httpx.Client) -> None:
        """Look at every workspace, and delete those that are not kept."""
        for name, possible in self.possible.items():
            if name == KEPT or possible == {None}:
                continue
            found = self._read(client, name)
            assert found in possible, f"workspace {name} holds {found!r:.40}, not one of {possible!r:.200}"
        drafts = [*os.listdir(self.data_dir / "drafts"), *os.listdir(self.data_dir / "volume-drafts")]
        assert not drafts, f"left: {drafts}"
        inside = [os.listdir(each) for each in (self.data_dir / "volumes").iterdir()]
        assert all(each == ["image"] for each in inside), inside
        for name in (WRITTEN, LIMITED, IMPORTED):
            self._delete(client, name)  # a delete ends the file helper at once
        listed = [each["id"] for each in client.get("/v1/workspaces").json()["workspaces"]]
        assert (listed, os.listdir(self.data_dir / "workspaces")) == ([KEPT], [KEPT])
        assert os.listdir(self.data_dir / "volumes") == []

    def _write(self, client: httpx.Client, name: str, text: str) -> bool:
        change = self._changing(name, text)
        answer = client.post(f"/v1/workspaces/{name}/fs/write", json={"path": "f", "text": text})
        return change.answered(answer, 200)

    def _import(self, client: httpx.Client, name: str, text: str, *, replace: bool) -> bool:
        change = self._changing(name, text)
        options = {"replace": str(replace).lower()}
        url = f"/v1/workspaces/{name}/import"
        return change.answered(client.post(url, content=_archive(text), params=options, headers=_TAR), 201)

    def _delete(self, client: httpx.Client, name: str) -> bool:
        change = self._changing(name, None)
        answer = client.delete(f"/v1/workspaces/{name}")
        return change.answered(answer, 404 if answer.status_code == 404 else 200) and answer.status_code == 200

    def _read(self, client: httpx.Client, name: str) -> str | None:
        """Return what is in the file; a workspace that was made and not written to is as good as none."""
        answer = client.get(f"/v1/workspaces/{name}/fs/read", params={"path": "f"})
        if answer.status_code == 404:
            return None
        assert answer.status_code == 200, answer.text
        return base64.b64decode(answer.json()["content_base64"]).decode()

    def _changing(self, name: str, text: str | None) -> _Change:
        possible = self.possible.setdefault(name, {None})
        possible.add(text)
        return _Change(possible, text)


@attrs.define
class _Change:
    """A request that may or may not have been carried out, until it is answered."""

    possible: set[str | None]
    text: str | None

    def answered(self, answer: httpx.Response, status: int) -> bool:
        """Note that the request was answered, and tell whether by the expected status. A refusal says nothing of the
        effect.
        """
        if answer.status_code == status:
            self.possible.clear()
            self.possible.add(self.text)
        return answer.status_code == status


def _archive(text: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("f")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return file.getvalue()
