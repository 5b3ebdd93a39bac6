-- Uploads that have begun. What has come of each lies beside its target, in the sandbox.

CREATE TABLE uploads (
    id       TEXT PRIMARY KEY,
    place    TEXT NOT NULL,   -- id of a session, or "workspace/" and the id of a workspace
    begun_at REAL NOT NULL,   -- seconds since the epoch, UTC
    spec     TEXT NOT NULL    -- JSON, fields as `UploadSpec` has them
) STRICT;

CREATE INDEX uploads_by_place ON uploads (place);
