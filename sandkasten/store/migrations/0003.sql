-- What was chosen when a session was made and holds for its life: a JSON object, fields as `SessionOptions` has them.

ALTER TABLE sessions ADD COLUMN options TEXT NOT NULL DEFAULT '{}';
