"""Names that clients depend on stay, and the SDK's types are those of the description."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.api.described import DOCUMENT, missing_of

ROOT = Path(__file__).resolve().parents[2]
REFERENCE: Mapping[str, Any] = runpy.run_path(str(ROOT / "docs/reference.py"))  # functions

SDK: Mapping[str, tuple[str, set[str]]] = {
    "ExecResult": ("ExecResult", {"encoding", "output="}),
    "ExecBytes": ("ExecResult", {"encoding", "output", "stderr=", "stdout="}),
    "RunEnd": ("End", set()),
    "RunInfo": ("Process", {"trace_id"}),
    "OutputPart": ("Output", {"text", "content_base64", "+data"}),
    "Waited": ("Waited", {"process", "+run"}),
    "Port": ("Port", set()),
    "ShellInfo": ("Shell", set()),
    "SessionInfo": ("Session", {"+container_id"}),
    "SessionStats": ("SessionStats", set()),
    "NetworkInfo": ("NetworkInfo", set()),
    "Preview": ("OpenedPreview", set()),
    "SecretInfo": ("Secret", set()),
    "JobInfo": ("Job", set()),
    "LayerInfo": ("LayerProgress", set()),
    "ImageInfo": ("Image", set()),
    "PrunedImages": ("Pruned", set()),
    "EgressEntry": ("EgressEntry", set()),
    "EgressPage": ("Egress", set()),
    "ReadResult": ("File", {"content_base64", "+content"}),
    "WorkspaceInfo": ("Workspace", set()),
    "FileInfo": ("FileInfo", {"owner"}),
    "WrittenFile": ("Put", set()),
    "UnpackedArchive": ("Unpacked", {"ok"}),
    "FileView": ("View", set()),
    "FileEdit": ("Edit", set()),
    "Match": ("Match", set()),
    "Matches": ("Totals", {"matches", "+found"}),
    "WatchedChange": ("Change", set()),
    "Event": ("Event", {"+trace_id", "+key_id"}),
    "NodeInfo": ("Node", set()),
    "SystemInfo": ("System", set()),
}
"""The component of each of the SDK's types, and the differences that are meant: see `missing_of`."""


BEFORE = {
    "get_it": ["GET:/it", "query.a:string", "200:application/json:It"],
    "in Put": ["a:string"],
    "out It": ["a:string"],
}


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"get_more": ["GET:/more"]}, []),
        ({"in Put": ["a:string", "b:integer"], "out It": ["a:string", "b:integer*"]}, []),
        (
            {"get_it": None},
            ["get_it: 200:application/json:It is gone", "get_it: GET:/it is gone", "get_it: query.a:string is gone"],
        ),
        ({"out It": []}, ["out It: a:string is gone"]),
        ({"out It": ["a:integer"]}, ["out It: a:string is gone"]),
        ({"in Put": ["a:string", "b:integer*"]}, ["in Put: b:integer* is new"]),
    ],
)
def test_what_breaks_clients_is_refused(changes: Mapping[str, list[str] | None], faults: list[str]) -> None:
    """A route or a field that is gone or of another type, and a field that is newly required; not what is added."""
    after = {name: names for name, names in {**BEFORE, **changes}.items() if names is not None}
    assert REFERENCE["broken"](BEFORE, after) == faults


def test_every_name_is_in_the_file() -> None:
    """Operations, components, their fields and messages; what is written is read as the same."""
    names = REFERENCE["names_of"](DOCUMENT)
    assert {"GET:/v1/sessions/{id}", "path.id:string*", "200:application/json:Session"} <= set(names["get_session"])
    assert "websocket.client.start:ChannelStart" in names["get_session_exec_ws"]
    assert {"id:string*", "status=running", "reason:string"} <= set(names["out Session"])
    assert REFERENCE["read_names"](REFERENCE["spell_names"](names)) == names


def test_differences_of_a_dataclass_are_found() -> None:
    """A member without a field, a field without a member, and a field that must be given."""

    @dataclasses.dataclass
    class Put:
        path: str
        size: int
        more: int = 0

    assert missing_of("Put", Put) == {"etag", "+more"}

    @dataclasses.dataclass
    class Shell:
        name: str
        cwd: str
        queued: list[str]
        running: str

    assert missing_of("Shell", Shell) == set()
    assert missing_of("Waited", dataclasses.make_dataclass("Waited", ["happened", "process", "line"])) == {"line="}


@pytest.mark.skipif(importlib.util.find_spec("sandkasten.sdk") is None, reason="there is no SDK here")
def test_the_sdks_types_have_what_is_answered() -> None:
    """A new member of an answer is a new field, or a difference that is meant."""
    types = importlib.import_module("sandkasten.sdk.types")
    found = {name: missing_of(component, getattr(types, name)) for name, (component, _) in SDK.items()}
    assert found == {name: meant for name, (_, meant) in SDK.items()}
    taken = {name for name, each in vars(types).items() if isinstance(each, type) and issubclass(each, types.Taken)}
    assert taken - {"Taken", "_Ended"} == SDK.keys() - {"ReadResult"}
