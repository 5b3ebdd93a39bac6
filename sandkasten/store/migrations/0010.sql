-- How old a session and its last use were, in seconds, at `clock_s` of the clock that nobody sets (CLOCK_MONOTONIC of
-- the boot `boot_id`): so a lease goes on over a restart whatever was done to the time of day. NULL in rows of earlier
-- versions.

ALTER TABLE sessions ADD COLUMN clock_s REAL;
ALTER TABLE sessions ADD COLUMN idle_s REAL;
ALTER TABLE sessions ADD COLUMN age_s REAL;
