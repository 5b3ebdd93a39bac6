-- Work on images that goes on after its request. No column has credentials.

CREATE TABLE image_jobs (
    id              TEXT PRIMARY KEY,
    kind            TEXT NOT NULL,
    state           TEXT NOT NULL,
    reference       TEXT NOT NULL,   -- with registry and tag or digest
    name            TEXT NOT NULL,
    platform        TEXT NOT NULL,
    created_at      REAL NOT NULL,   -- seconds since the epoch, UTC
    ended_at        REAL,
    digest          TEXT,            -- of the pulled image
    error           TEXT,            -- JSON, fields as `JobError` has them
    idempotency_key TEXT UNIQUE,
    replaces        INTEGER NOT NULL
) STRICT;

CREATE INDEX image_jobs_by_time ON image_jobs (created_at);
