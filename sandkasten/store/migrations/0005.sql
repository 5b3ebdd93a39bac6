-- The boot of the machine that `pid`, `start_ticks` and `pid_ns` belong to; NULL in rows of earlier versions.

ALTER TABLE sessions ADD COLUMN boot_id TEXT;
