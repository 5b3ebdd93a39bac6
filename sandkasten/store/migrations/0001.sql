-- What the node keeps of itself, its sessions (the live ones and the ended ones), workspaces and events.

CREATE TABLE node (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

CREATE TABLE sessions (
    id              TEXT PRIMARY KEY,
    status          TEXT NOT NULL,
    image           TEXT NOT NULL,
    cwd             TEXT NOT NULL,
    workspace_id    TEXT,
    created_at      REAL NOT NULL,   -- seconds since the epoch, UTC
    expires_at      REAL,            -- null: never
    last_activity   REAL NOT NULL,
    ended_at        REAL,
    ttl_s           REAL,            -- null: no idle end
    max_lifetime_s  REAL,            -- null: no hard end
    limits          TEXT NOT NULL,   -- JSON, fields as `Limits` has them
    labels          TEXT NOT NULL,   -- JSON
    options         TEXT NOT NULL,   -- JSON, fields as `SessionOptions` has them
    pause           TEXT,            -- JSON, fields as `Pause` has them, `since` in seconds since the epoch
    acquire_source  TEXT NOT NULL,
    reason          TEXT,
    ending          TEXT,            -- the event that began `destroying`
    end_reason      TEXT,
    epoch           INTEGER NOT NULL,
    incarnation     INTEGER NOT NULL,
    pid             INTEGER,         -- PID 1 of the sandbox, its start time in clock ticks, the inode of its pid
    start_ticks     INTEGER,         -- namespace, and the boot of the machine in which these mean something
    pid_ns          INTEGER,
    boot_id         TEXT,
    is_busy         INTEGER NOT NULL,
    idempotency_key TEXT UNIQUE,
    spec_digest     TEXT NOT NULL,
    key_id          TEXT,            -- public id of the API key that made it; null for users of the library
    clock_s         REAL,            -- CLOCK_MONOTONIC when the session had been idle for idle_s and there for age_s,
    idle_s          REAL,            -- so that a lease goes on over a restart whatever was done to the time of day
    age_s           REAL
) STRICT;

CREATE INDEX sessions_by_age ON sessions (created_at DESC, id DESC);
CREATE INDEX sessions_by_status ON sessions (status, created_at DESC, id DESC);
CREATE INDEX sessions_by_end ON sessions (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX sessions_by_workspace ON sessions (workspace_id) WHERE workspace_id IS NOT NULL;

-- Beside the files of a workspace, which lie in a directory of their own and need no row.

CREATE TABLE workspaces (
    id          TEXT PRIMARY KEY,
    created_at  REAL NOT NULL,   -- seconds since the epoch, UTC
    last_used   REAL NOT NULL,
    labels      TEXT NOT NULL,   -- JSON object
    quota_bytes INTEGER,         -- both null: without a quota
    quota_files INTEGER
) STRICT;

-- The journal of events. A cursor is text of fixed width: its order as text is the order of the events.

CREATE TABLE events (
    cursor     TEXT PRIMARY KEY,
    time_ms    INTEGER NOT NULL,   -- milliseconds since the epoch, UTC
    type       TEXT NOT NULL,
    session_id TEXT NOT NULL,
    data       TEXT NOT NULL       -- JSON object
) STRICT, WITHOUT ROWID;

CREATE INDEX events_by_session ON events (session_id, cursor);
