-- The API key that made a session, by its public id; NULL in rows of earlier versions and for users of the library.

ALTER TABLE sessions ADD COLUMN key_id TEXT;
