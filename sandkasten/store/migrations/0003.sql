-- The network of a session, which may change while the session lives.

ALTER TABLE sessions ADD COLUMN network TEXT;                                    -- JSON, fields as `Network` has them; null: none
ALTER TABLE sessions ADD COLUMN network_revision INTEGER NOT NULL DEFAULT 1;     -- counts its changes
