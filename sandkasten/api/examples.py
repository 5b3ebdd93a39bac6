"""Examples of the bodies of requests, by class. Each is in `/openapi.json`, and the seed of the fuzzer of bodies.

A body without a field has none. A test reads each example with its class, whose schema accepts it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandkasten.api.resources import (
    file_changes,
    file_entries,
    file_search,
    file_texts,
    file_uploads,
    files,
    images,
    jobs,
    previews,
    runs,
    secrets,
    sessions,
    workspaces,
)

EXAMPLES: Mapping[type, Sequence[Mapping[str, Any]]] = {  # JSON values
    sessions.CreateRequest: (
        {"image": "python", "ttl_seconds": 3600, "labels": {"team": "research"}},
        {
            "workspace_id": "project-1",
            "idempotency_key": "job-42",
            "env": {"MODE": "test", "API_TOKEN": {"secret": "api"}},
            "limits": {"cpu": 0.5, "memory_mb": 512, "pids": 128, "disk_mb": 1024},
            "shell": "sh",
            "max_lifetime_seconds": 86400,
            "readonly_rootfs": True,
            "network": {"mode": "none", "allow": []},
        },
        {"network": {"mode": "allow", "allow": ["@python", "git.example.org:22"], "log": "denied"}},
    ),
    sessions.PatchRequest: (
        {"ttl_seconds": 600, "labels": {}, "limits": {"cpu": 1}, "env": {"MODE": None}},
        {"network": {"mode": "open", "deny": ["192.0.2.0/24"]}, "if_revision": 1},
    ),
    sessions.PauseRequest: ({"auto_resume": True, "stop_lease": False},),
    runs.ExecRequest: (
        {"cmd": "pip list | head -3", "timeout_ms": 30000},
        {
            "cmd": "cat",
            "mode": "stateful",
            "shell": "default",
            "timeout_ms": 5000,
            "cwd": "/workspace",
            "env": {"LANG": "C.UTF-8"},
            "stdin": "a line\n",
            "exec_id": "step-1",
            "raw_output": False,
            "encoding": "base64",
            "on_timeout": "result",
            "on_disconnect": "detach",
        },
        {"argv": ["ls", "-l"], "user": "1000:1000", "tty": {"cols": 80, "rows": 24}, "stdin": True},
    ),
    runs.ProcessRequest: ({"cmd": "python3 -m http.server 8000", "process_id": "server", "keep_alive": True},),
    runs.ShellRequest: ({"name": "second", "shell": "bash", "cwd": "/workspace", "env": {"LANG": "C.UTF-8"}},),
    runs.WaitRequest: (
        {"for": "exit", "timeout_ms": 1000},
        {"port": 8000, "timeout_ms": 1000},
        {"pattern": "listening on port [0-9]+", "timeout_ms": 1000},
    ),
    runs.StdinRequest: ({"text": "yes\n", "close": True}, {"content_base64": "eWVzCg=="}),
    runs.SignalRequest: ({"signal": "INT"}, {"signal": 15}),
    runs.CancelRequest: ({"now": True},),
    runs.TerminalRequest: ({"cols": 120, "rows": 40},),
    file_entries.StatRequest: ({"paths": ["src/main.py", "/etc/os-release"], "follow": True},),
    file_search.GlobRequest: ({"pattern": "**/*.py", "path": "src", "limit": 100},),
    file_search.SearchRequest: ({"pattern": "def +main", "regex": True, "glob": "*.py", "context": 2},),
    file_texts.EditRequest: (
        {
            "edits": [
                {"op": "replace", "path": "src/main.py", "old": "print(1)", "new": "print(2)"},
                {"op": "create", "path": "notes.txt", "text": "one\n"},
            ]
        },
    ),
    file_changes.MakeRequest: ({"path": "src/package", "parents": True, "mode": "755"},),
    file_changes.MoveRequest: ({"from": "draft.txt", "to": "report.txt", "overwrite": True},),
    file_changes.ModeRequest: ({"path": "run.sh", "mode": "755"},),
    file_changes.OwnerRequest: ({"user": "root", "path": "/srv", "uid": 1000, "gid": 1000, "recursive": True},),
    file_uploads.UploadRequest: ({"path": "data.bin", "size": 1073741824, "mode": "644"},),
    files.WriteRequest: (
        {"path": "hello.txt", "text": "hello\n"},
        {"path": "/tmp/hello.bin", "content_base64": "aGVsbG8K"},
    ),
    previews.PreviewRequest: ({"port": 8000, "ttl_seconds": 3600},),
    secrets.SecretRequest: ({"name": "api", "value": "the-value-of-the-secret", "hosts": ["api.example.org"]},),
    images.CommitImageRequest: ({"name": "tools", "config": {"env": {"MODE": "test"}, "cmd": ["serve"]}},),
    images.PruneRequest: ({"older_than_s": 3600, "dry_run": True},),
    jobs.PullRequest: ({"reference": "registry.example.org/team/tools:v1", "name": "tools"},),
    workspaces.WorkspaceRequest: ({"id": "project-1", "labels": {"team": "research"}, "quota_bytes": 1073741824},),
    workspaces.WorkspacePutRequest: ({"labels": {"team": "research"}},),
    workspaces.WorkspacePatchRequest: ({"quota_bytes": 2147483648},),
}
