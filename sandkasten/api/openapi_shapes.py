"""What answers look like, for the description of the HTTP interface: by name, as JSON Schema.

Says which members are always there, and nothing against others: new ones may come. The tests hold real answers against
it. What is an attrs class all through is not written here but read from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sandkasten.model import Cause, EventType, ExecKind, ExecState, Status
from sandkasten.model.session import EndReason

Schema = dict[str, Any]  # JSON values

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}
ANY: Schema = {}


def shape(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """Return the schema of an object with these members, and perhaps others."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def listed(name: str, of: str) -> Schema:
    """Return the schema of an object whose one member is an array."""
    return shape({name: {"type": "array", "items": ref(of)}})


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _one_of(values: type[StrEnum]) -> Schema:
    return {"type": "string", "enum": [value.value for value in values]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_END = {
    "exit_code": COUNT,
    "cwd": TEXT,
    "duration_ms": COUNT,
    "exec_id": TEXT,
    "cause": _one_of(Cause),
    "timed_out": FLAG,
}
_RUN = {
    "exec_id": TEXT,
    "kind": _one_of(ExecKind),
    "state": _one_of(ExecState),
    "command": TEXT,
    "created_at": TIME,
    "stdout_bytes": COUNT,
    "stderr_bytes": COUNT,
    "first_sequence": COUNT,
    "last_sequence": COUNT,
}

SHAPES: Mapping[str, Schema] = {
    "Error": shape(
        {"error_code": TEXT, "message": TEXT, "retryable": FLAG, "request_id": TEXT}, details={"type": "object"}
    ),
    "Done": shape({"ok": {"const": True}}),
    "Health": shape({"status": {"const": "ok"}}),
    "Readiness": shape({"ready": FLAG, "checks": {"type": "object", "additionalProperties": TEXT}}),
    "Session": shape(
        {
            "id": TEXT,
            "image": TEXT,
            "status": _one_of(Status),
            "cwd": TEXT,
            "created_at": TIME,
            "expires_at": _or_null(TIME),
            "last_activity": TIME,
            "acquire_source": TEXT,
            "limits": {"type": "object"},
            "labels": {"type": "object", "additionalProperties": TEXT},
            "epoch": COUNT,
        },
        end_reason=_one_of(EndReason),
        reason=TEXT,
        workspace_id=TEXT,
        pause={"type": "object"},
    ),
    "Sessions": {"type": "array", "items": ref("Session")},
    "Node": shape({"id": TEXT, "status": TEXT, "time": TIME, "started_at": TIME, "capacity": {"type": "object"}}),
    "System": shape(
        {"version": TEXT, "kernel": TEXT, "cgroup_mode": TEXT, "protections": {"type": "array"}, "checks": ANY}
    ),
    "Diagnosis": shape({"time": TIME, "session": ref("Session")}),
    "ExecResult": shape({**_END, "output": TEXT, "truncated": FLAG}, stdout=TEXT, stderr=TEXT, signal=COUNT),
    "Run": shape(_RUN, end=shape(_END), shell=TEXT, started_at=TIME, ended_at=TIME, pid=COUNT, trace_id=TEXT),
    "Runs": listed("execs", "Run"),
    "Process": shape({"process_id": TEXT, "keep_alive": FLAG, **_RUN}, end=shape(_END)),
    "Processes": listed("processes", "Process"),
    "Waited": shape({"happened": FLAG, "process": ref("Process")}, line=TEXT),
    "Output": {"type": "object"},
    "Shell": shape({"name": TEXT, "cwd": TEXT}),
    "Shells": listed("shells", "Shell"),
    "Ports": shape({"ports": {"type": "array", "items": shape({"port": COUNT, "address": TEXT})}}),
    "File": shape({"path": TEXT, "content_base64": TEXT, "truncated": FLAG}),
    "Written": shape({"ok": {"const": True}, "path": TEXT}),
    "Uploaded": shape({"ok": {"const": True}, "paths": {"type": "array", "items": TEXT}}),
    "Workspace": shape(
        {"id": TEXT, "created_at": TIME, "labels": {"type": "object"}, "session_count": COUNT, "has_directory": FLAG},
        usage={"type": "object"},
        quota_bytes={"type": ["integer", "null"]},
        quota_files={"type": ["integer", "null"]},
    ),
    "Workspaces": listed("workspaces", "Workspace"),
    "Imported": shape({"ok": {"const": True}, "entries": COUNT, "size_bytes": COUNT, "skipped": COUNT}),
    "Key": shape(
        {
            "id": TEXT,
            "name": TEXT,
            "access": TEXT,
            "label": _or_null({"type": "object"}),
            "created_at": _or_null(TIME),
            "expires_at": _or_null(TIME),
            "last_used_at": _or_null(TIME),
            "quota": {"type": "object"},
            "usage": {"type": "object"},
        }
    ),
    "Keys": shape({"keys": {"type": "array", "items": ref("Key")}}, trouble=TEXT),
    "FileInfo": shape({"name": TEXT, "is_dir": FLAG, "type": TEXT, "size": COUNT, "mode": TEXT}),
    "Files": listed("entries", "FileInfo"),
    "Event": shape(
        {"cursor": TEXT, "time": TIME, "type": _one_of(EventType), "session_id": TEXT, "data": {"type": "object"}}
    ),
}
