-- A pause under way: a JSON object, fields as `Pause` has them, `since` in seconds since the epoch, UTC.

ALTER TABLE sessions ADD COLUMN pause TEXT;
