-- Bytes of uploaded files. A draft becomes held in the commit that makes its file visible; a dead
-- one is removed by the sweep, a few chunks per commit.
CREATE TABLE blobs (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    state       TEXT NOT NULL DEFAULT 'draft' CHECK (state IN ('draft', 'held', 'dead')),
    created_at  INTEGER NOT NULL
) STRICT;

CREATE INDEX blobs_to_sweep ON blobs (seq) WHERE state = 'dead';

-- Pieces of a blob, cut at line ends; `start` is the byte offset of the piece.
CREATE TABLE chunks (
    seq    INTEGER PRIMARY KEY,
    blob   INTEGER NOT NULL REFERENCES blobs (seq),
    start  INTEGER NOT NULL CHECK (start >= 0),
    data   BLOB NOT NULL CHECK (length(data) > 0),
    UNIQUE (blob, start)
) STRICT;

-- Files that a client can see. A deleted one stays as a row without bytes: cursors that name it go
-- on, and its batches keep a parent.
CREATE TABLE files (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    id          TEXT NOT NULL UNIQUE,
    owner       TEXT NOT NULL,
    filename    TEXT NOT NULL,
    purpose     TEXT NOT NULL,
    kind        TEXT NOT NULL CHECK (kind IN ('input', 'output', 'error')),
    bytes       INTEGER NOT NULL CHECK (bytes >= 0),
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER CHECK (expires_at >= created_at),
    deleted_at  INTEGER,
    swept_at    INTEGER,
    facts       TEXT NOT NULL CHECK (json_valid(facts)),
    blob        INTEGER UNIQUE REFERENCES blobs (seq),
    batch_seq   INTEGER REFERENCES batches (seq),
    CHECK ((kind = 'input') = (batch_seq IS NULL)),
    CHECK (kind = 'input' OR blob IS NULL),
    CHECK (kind <> 'input' OR (swept_at IS NULL) = (blob IS NOT NULL)),
    CHECK (swept_at IS NULL OR deleted_at IS NOT NULL)
) STRICT;

CREATE INDEX files_of_owner ON files (owner, seq) WHERE deleted_at IS NULL;
CREATE INDEX files_to_expire ON files (expires_at) WHERE deleted_at IS NULL;
CREATE INDEX files_to_sweep ON files (seq) WHERE deleted_at IS NOT NULL AND swept_at IS NULL;
CREATE UNIQUE INDEX files_of_batch ON files (batch_seq, kind) WHERE batch_seq IS NOT NULL;

-- Batches. `queued` and `running` count the lines in these states, `output_bytes` and `error_bytes`
-- are the lengths of the two result streams: kept here so that no settlement counts rows.
CREATE TABLE batches (
    seq                     INTEGER PRIMARY KEY AUTOINCREMENT,
    id                      TEXT NOT NULL UNIQUE,
    owner                   TEXT NOT NULL,
    key_id                  TEXT,
    input_file_id           TEXT NOT NULL,
    input_file_seq          INTEGER NOT NULL REFERENCES files (seq),
    endpoint                TEXT NOT NULL,
    completion_window       TEXT NOT NULL,
    status                  TEXT NOT NULL DEFAULT 'validating' CHECK (status IN (
        'validating', 'in_progress', 'finalizing', 'completed', 'failed',
        'cancelling', 'cancelled', 'expiring', 'expired'
    )),
    created_at              INTEGER NOT NULL,
    expires_at              INTEGER NOT NULL,
    in_progress_at          INTEGER,
    finalizing_at           INTEGER,
    completed_at            INTEGER,
    failed_at               INTEGER,
    expired_at              INTEGER,
    cancelling_at           INTEGER,
    cancelled_at            INTEGER,
    metadata                TEXT CHECK (metadata IS NULL OR json_valid(metadata)),
    params                  TEXT NOT NULL CHECK (json_valid(params)),
    placement               TEXT NOT NULL CHECK (json_valid(placement)),
    problems                TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(problems)),
    output_expires_after_s  INTEGER,
    idempotency_key         TEXT,
    exclusive               INTEGER NOT NULL CHECK (exclusive IN (0, 1)),
    model                   TEXT,
    total                   INTEGER NOT NULL DEFAULT 0 CHECK (total >= 0),
    completed               INTEGER NOT NULL DEFAULT 0 CHECK (completed >= 0),
    failed                  INTEGER NOT NULL DEFAULT 0 CHECK (failed >= 0),
    queued                  INTEGER NOT NULL DEFAULT 0 CHECK (queued >= 0),
    running                 INTEGER NOT NULL DEFAULT 0 CHECK (running >= 0),
    lines_rerun             INTEGER NOT NULL DEFAULT 0 CHECK (lines_rerun >= 0),
    input_tokens            INTEGER NOT NULL DEFAULT 0,
    cached_tokens           INTEGER NOT NULL DEFAULT 0,
    output_tokens           INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens        INTEGER NOT NULL DEFAULT 0,
    output_bytes            INTEGER NOT NULL DEFAULT 0 CHECK (output_bytes >= 0),
    error_bytes             INTEGER NOT NULL DEFAULT 0 CHECK (error_bytes >= 0),
    output_file_id          TEXT,
    error_file_id           TEXT,
    pruned                  INTEGER NOT NULL DEFAULT 0 CHECK (pruned IN (0, 1)),
    CHECK (pruned = 0 OR status IN ('completed', 'failed', 'cancelled', 'expired')),
    -- A batch whose lines ran here ends only when every line is in one of the two result files.
    CHECK (
        status NOT IN ('completed', 'cancelled', 'expired')
        OR json_extract(placement, '$.execution') <> 'local'
        OR (queued = 0 AND running = 0 AND completed + failed = total)
    ),
    CHECK (output_file_id IS NULL OR status IN ('completed', 'failed', 'cancelled', 'expired')),
    CHECK (error_file_id IS NULL OR status IN ('completed', 'failed', 'cancelled', 'expired'))
) STRICT;

CREATE INDEX batches_of_owner ON batches (owner, seq);
CREATE INDEX batches_active ON batches (seq)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring');
CREATE INDEX batches_active_of_file ON batches (input_file_seq)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring');
CREATE UNIQUE INDEX batches_exclusive ON batches (input_file_seq)
    WHERE exclusive = 1
    AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring');
CREATE UNIQUE INDEX batches_idempotent ON batches (owner, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX batches_to_prune ON batches (seq)
    WHERE pruned = 0 AND status IN ('completed', 'failed', 'cancelled', 'expired');

-- One request of a batch: where its bytes are in the input file, and how far it got. `token` is the
-- fence: no two leases of this store have the same, and a settlement with an older one changes nothing.
CREATE TABLE lines (
    batch_seq    INTEGER NOT NULL REFERENCES batches (seq),
    no           INTEGER NOT NULL CHECK (no > 0),
    offset       INTEGER NOT NULL CHECK (offset >= 0),
    length       INTEGER NOT NULL CHECK (length > 0),
    custom_id    TEXT NOT NULL,
    model        TEXT NOT NULL,
    state        TEXT NOT NULL DEFAULT 'queued' CHECK (state IN (
        'queued', 'running', 'succeeded', 'failed', 'cancelled', 'expired'
    )),
    attempt      INTEGER NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    token        INTEGER NOT NULL DEFAULT 0 CHECK (token >= 0),
    holder       TEXT,
    lease_until  INTEGER,
    due_at       REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (batch_seq, no),
    UNIQUE (batch_seq, custom_id),
    CHECK ((state = 'running') = (holder IS NOT NULL)),
    CHECK ((holder IS NULL) = (lease_until IS NULL)),
    CHECK (state = 'queued' OR due_at = 0)
) STRICT, WITHOUT ROWID;

CREATE INDEX lines_queued ON lines (batch_seq, no, due_at) WHERE state = 'queued';
CREATE INDEX lines_waiting ON lines (due_at) WHERE state = 'queued' AND due_at > 0;
CREATE INDEX lines_running ON lines (holder, lease_until) WHERE state = 'running';

-- The last token that a lease got: one row, grows only.
CREATE TABLE fence (
    one    INTEGER PRIMARY KEY CHECK (one = 1),
    token  INTEGER NOT NULL
) STRICT;

INSERT INTO fence VALUES (1, 0);

-- Result rows in commit order. The output file of a batch is its 'output' rows, each followed by a
-- line end; `start` is the byte offset of the row in that stream.
CREATE TABLE results (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_seq  INTEGER NOT NULL REFERENCES batches (seq),
    no         INTEGER NOT NULL,
    kind       TEXT NOT NULL CHECK (kind IN ('output', 'error')),
    start      INTEGER NOT NULL CHECK (start >= 0),
    row        BLOB NOT NULL CHECK (length(row) > 0),
    UNIQUE (batch_seq, no),
    UNIQUE (batch_seq, kind, start)
) STRICT;

CREATE INDEX results_of_batch ON results (batch_seq);

-- What was used, one row per answered line or interactive request.
CREATE TABLE usage (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    owner      TEXT NOT NULL,
    key_id     TEXT,
    model      TEXT NOT NULL,
    execution  TEXT NOT NULL,
    tier       TEXT NOT NULL,
    input      INTEGER NOT NULL CHECK (input >= 0),
    cached     INTEGER NOT NULL CHECK (cached >= 0),
    output     INTEGER NOT NULL CHECK (output >= 0),
    reasoning  INTEGER NOT NULL CHECK (reasoning >= 0),
    batch_seq  INTEGER REFERENCES batches (seq),
    custom_id  TEXT,
    at         INTEGER NOT NULL,
    CHECK ((batch_seq IS NULL) = (custom_id IS NULL))
) STRICT;

CREATE UNIQUE INDEX usage_once ON usage (batch_seq, custom_id) WHERE batch_seq IS NOT NULL;
CREATE INDEX usage_of_owner ON usage (owner, at);
CREATE INDEX usage_by_time ON usage (at);

-- API keys; the secret is known only by its SHA-256.
CREATE TABLE keys (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    id          TEXT NOT NULL UNIQUE,
    name        TEXT NOT NULL,
    owner       TEXT NOT NULL,
    prefix      TEXT NOT NULL,
    digest      TEXT NOT NULL UNIQUE,
    scopes      TEXT NOT NULL CHECK (json_valid(scopes)),
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER,
    revoked_at  INTEGER
) STRICT;

-- Small things worth remembering for a while.
CREATE TABLE facts (
    kind      TEXT NOT NULL,
    key       TEXT NOT NULL,
    value     BLOB NOT NULL,
    set_at    INTEGER NOT NULL,
    until_at  INTEGER,
    PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID;
