-- What providers hold for batches that have ended is deleted there once it is here.
ALTER TABLE upstream_batches ADD COLUMN input_id TEXT CHECK (input_id <> '');
ALTER TABLE upstream_batches ADD COLUMN ended_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE upstream_batches ADD COLUMN cleared_at INTEGER;

CREATE INDEX upstream_uncleared ON upstream_batches (provider, batch_seq)
WHERE settled_at IS NOT NULL AND cleared_at IS NULL;
