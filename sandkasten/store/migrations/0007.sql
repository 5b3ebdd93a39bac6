-- What is known of workspaces beside their files, which lie in directories of their own and need no row.

CREATE TABLE workspaces (
    id         TEXT PRIMARY KEY,
    created_at REAL NOT NULL,   -- seconds since the epoch, UTC
    last_used  REAL NOT NULL,
    labels     TEXT NOT NULL    -- JSON object
) STRICT;

CREATE INDEX sessions_by_workspace ON sessions (workspace_id) WHERE workspace_id IS NOT NULL;
