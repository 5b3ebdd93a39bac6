-- Sessions of this node, the live ones and the ended ones, and what identifies the node itself.

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
    expires_at      REAL NOT NULL,
    last_activity   REAL NOT NULL,
    ended_at        REAL,
    ttl_s           REAL NOT NULL,
    max_lifetime_s  REAL,
    limits          TEXT NOT NULL,   -- JSON
    labels          TEXT NOT NULL,   -- JSON
    acquire_source  TEXT NOT NULL,
    reason          TEXT,
    ending          TEXT,            -- the event that began `destroying`
    epoch           INTEGER NOT NULL,
    incarnation     INTEGER NOT NULL,
    pid             INTEGER,
    start_ticks     INTEGER,
    pid_ns          INTEGER,
    idempotency_key TEXT UNIQUE,
    spec_digest     TEXT NOT NULL
) STRICT;

CREATE INDEX sessions_by_age ON sessions (created_at DESC);
CREATE INDEX sessions_by_status ON sessions (status, created_at DESC);
