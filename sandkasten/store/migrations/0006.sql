-- Leases may have no end (null), every ended session says why in one word, and a record says whether the session was busy.
-- SQLite can't take a NOT NULL away, so the table is made anew.

CREATE TABLE sessions_anew (
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
    limits          TEXT NOT NULL,   -- JSON
    labels          TEXT NOT NULL,   -- JSON
    options         TEXT NOT NULL DEFAULT '{}',  -- JSON, fields as `SessionOptions` has them
    pause           TEXT,            -- JSON, fields as `Pause` has them
    acquire_source  TEXT NOT NULL,
    reason          TEXT,
    ending          TEXT,            -- the event that began `destroying`
    end_reason      TEXT,
    epoch           INTEGER NOT NULL,
    incarnation     INTEGER NOT NULL,
    pid             INTEGER,
    start_ticks     INTEGER,
    pid_ns          INTEGER,
    boot_id         TEXT,            -- of `pid`, `start_ticks` and `pid_ns`
    is_busy         INTEGER NOT NULL DEFAULT 0,
    idempotency_key TEXT UNIQUE,
    spec_digest     TEXT NOT NULL
) STRICT;

INSERT INTO sessions_anew
SELECT id, status, image, cwd, workspace_id, created_at, expires_at, last_activity, ended_at, ttl_s, max_lifetime_s,
       limits, labels, options, pause, acquire_source, reason, ending,
       CASE
           WHEN ending = 'build_failed' THEN 'error'
           WHEN status = 'destroyed' OR (status = 'destroying' AND ending = 'destroy') THEN 'user'
           WHEN status = 'expired' OR (status = 'destroying' AND ending = 'expire') THEN
               CASE WHEN expires_at >= created_at + max_lifetime_s - 0.01 THEN 'max_lifetime' ELSE 'idle' END
           WHEN status = 'crashed' AND reason LIKE 'out of memory%' THEN 'oom'
           WHEN status IN ('crashed', 'lost', 'destroying') THEN 'crashed'
       END,
       epoch, incarnation, pid, start_ticks, pid_ns, boot_id, 0, idempotency_key, spec_digest
FROM sessions;

DROP TABLE sessions;
ALTER TABLE sessions_anew RENAME TO sessions;

CREATE INDEX sessions_by_age ON sessions (created_at DESC, id DESC);
CREATE INDEX sessions_by_status ON sessions (status, created_at DESC, id DESC);
CREATE INDEX sessions_by_end ON sessions (ended_at) WHERE ended_at IS NOT NULL;
