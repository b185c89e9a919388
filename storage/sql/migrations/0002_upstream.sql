-- The copies of input files that providers hold.
CREATE TABLE upstream_files (
    file_seq    INTEGER NOT NULL REFERENCES files (seq),
    provider    TEXT NOT NULL,
    id          TEXT NOT NULL,
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER,
    PRIMARY KEY (file_seq, provider)
) STRICT, WITHOUT ROWID;

-- Forwarded batches as their provider last described them. A row without an id is one whose create
-- was about to be sent; `latched_until` is the right to settle, taken by one at a time.
CREATE TABLE upstream_batches (
    batch_seq      INTEGER PRIMARY KEY REFERENCES batches (seq),
    provider       TEXT NOT NULL,
    id             TEXT,
    status         TEXT NOT NULL,
    completed      INTEGER NOT NULL CHECK (completed >= 0),
    failed         INTEGER NOT NULL CHECK (failed >= 0),
    output_id      TEXT CHECK (output_id <> ''),
    error_id       TEXT CHECK (error_id <> ''),
    problems       TEXT NOT NULL CHECK (json_valid(problems)),
    intended_at    INTEGER NOT NULL,
    looked_at      INTEGER NOT NULL,
    tries          INTEGER NOT NULL CHECK (tries >= 0),
    settled_at     INTEGER,
    latched_until  INTEGER NOT NULL DEFAULT 0,
    UNIQUE (provider, id)
) STRICT;

CREATE INDEX upstream_unsettled ON upstream_batches (batch_seq) WHERE settled_at IS NULL;
