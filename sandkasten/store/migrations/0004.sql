-- The previews of a session, which outlive the daemon as the session does.

ALTER TABLE sessions ADD COLUMN previews TEXT;   -- JSON, by port, fields as `Preview` has them; null: none
