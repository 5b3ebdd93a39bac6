-- What may be in a workspace, NULL without such a limit: bytes, and files of any kind.

ALTER TABLE workspaces ADD COLUMN quota_bytes INTEGER;
ALTER TABLE workspaces ADD COLUMN quota_files INTEGER;
