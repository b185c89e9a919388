-- Teams and users: what keys belong to, and where limits hang. A closed one keeps its row, because
-- what it owns and what it spent still name it.
CREATE TABLE accounts (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    kind        TEXT NOT NULL CHECK (kind IN ('team', 'user')),
    id          TEXT NOT NULL UNIQUE CHECK (id LIKE kind || '\_%' ESCAPE '\'),
    name        TEXT NOT NULL CHECK (name <> ''),
    limits      TEXT NOT NULL CHECK (json_valid(limits)),
    created_at  INTEGER NOT NULL,
    closed_at   INTEGER CHECK (closed_at >= created_at)
) STRICT;

CREATE UNIQUE INDEX accounts_open ON accounts (kind, name) WHERE closed_at IS NULL;

ALTER TABLE keys ADD COLUMN team_id TEXT REFERENCES accounts (id);
ALTER TABLE keys ADD COLUMN user_id TEXT REFERENCES accounts (id);
ALTER TABLE keys ADD COLUMN limits TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(limits));
ALTER TABLE keys ADD COLUMN last_used_at INTEGER;

CREATE INDEX keys_of_team ON keys (team_id) WHERE team_id IS NOT NULL;
CREATE INDEX keys_of_user ON keys (user_id) WHERE user_id IS NOT NULL;

-- Who did what to which object. Rows are added and never changed.
CREATE TABLE audit (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    at          INTEGER NOT NULL,
    actor       TEXT NOT NULL,
    action      TEXT NOT NULL,
    object      TEXT NOT NULL,
    owner       TEXT,
    request_id  TEXT
) STRICT;

CREATE INDEX audit_of_object ON audit (object, seq);
CREATE INDEX audit_of_actor ON audit (actor, seq);

CREATE TRIGGER audit_keeps_rows BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
CREATE TRIGGER audit_keeps_words BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
