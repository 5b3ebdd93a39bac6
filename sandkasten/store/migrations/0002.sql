-- The journal of events. A cursor is text of fixed width: its order as text is the order of the events.

CREATE TABLE events (
    cursor     TEXT PRIMARY KEY,
    time_ms    INTEGER NOT NULL,   -- milliseconds since the epoch, UTC
    type       TEXT NOT NULL,
    session_id TEXT NOT NULL,
    data       TEXT NOT NULL       -- JSON object
) STRICT, WITHOUT ROWID;

CREATE INDEX events_by_session ON events (session_id, cursor);
